"""The in-process sampler for tiny models on a CPU: cuts a call into batches of rows and decodes each to its end."""

from collections.abc import Sequence

from engine.decode_loop import DecodeLoop, Row
from engine.model import Qwen3
from engine.packed_weights import PackedWeights
from engine.sampler import Completion, Respond, SampleRequest, SamplingParams

MAX_ROWS = 512


class EmbeddedSampler:
    """A ``Sampler`` that decodes with a key-value cache in this process.

    ``max_rows`` bounds a batch and thereby the cache; ``compact_below`` is the share of a batch's slots under which the
    rows still running are packed together (0: never). Neither changes a result beyond rounding.
    """

    def __init__(self, max_rows: int = MAX_ROWS, compact_below: float = 0.75):
        if max_rows < 1:
            raise ValueError(f"max_rows = {max_rows} must be at least 1")
        if not 0.0 <= compact_below <= 1.0:
            raise ValueError(f"compact_below = {compact_below} must lie between 0 and 1")
        self._max_rows = max_rows
        self._compact_below = compact_below
        self._weights: PackedWeights | None = None
        self.policy_version = -1

    def load(self, model: Qwen3, policy_version: int) -> None:
        """Copy the model's weights, packed for decoding."""
        self._weights = PackedWeights(model)
        self.policy_version = policy_version

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, respond: Respond | None = None
    ) -> list[list[Completion]]:
        """See ``Sampler.sample``. Rows with prompts of like length share a batch."""
        if self._weights is None:
            raise ValueError("the sampler has no weights; call load first")
        rows = _rows(requests, params, self._weights.shape.max_position_embeddings)
        rows.sort(key=lambda row: (row.room, row.number))
        completions: dict[int, Completion] = {}
        for start in range(0, len(rows), self._max_rows):
            batch = rows[start : start + self._max_rows]
            prompts = {row.request: requests[row.request].token_ids_T for row in batch}
            results = DecodeLoop(self._weights, batch, params, respond).run(prompts, self._compact_below)
            completions |= {row.number: result for row, result in zip(batch, results, strict=True)}
        ordered = iter(completions[number] for number in range(len(rows)))
        return [[next(ordered) for _ in range(request.num_samples)] for request in requests]


def _rows(requests: Sequence[SampleRequest], params: SamplingParams, max_positions: int) -> list[Row]:
    rows: list[Row] = []
    for index, request in enumerate(requests):
        room = max_positions - len(request.token_ids_T)
        if room < 1:
            raise ValueError(
                f"prompt {index} has {len(request.token_ids_T)} tokens and the model's context {max_positions}: "
                "shorten the prompt or raise max_position_embeddings"
            )
        budget = request.max_new_tokens or params.max_new_tokens
        rows += [Row(index, sample, len(rows) + sample, budget, room) for sample in range(request.num_samples)]
    return rows
