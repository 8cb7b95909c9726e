"""The in-process sampler for tiny models on a CPU: cuts a call into batches of rows and decodes each to its end."""

from collections.abc import Sequence

from engine.decode_loop import DecodeLoop, Row
from engine.model import ModelShape, Qwen3
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
        """See ``Sampler.sample``. Rows of like budget and prompt length share a batch.

        Raises FloatingPointError where the weights give hidden states that are not finite.
        """
        if self._weights is None:
            raise ValueError("the sampler has no weights; call load first")
        rows = _rows(requests, params, self._weights.shape)
        if not rows:
            return []
        rows.sort(key=lambda row: (row.budget, row.room, row.number))
        num_batches = -(-len(rows) // self._max_rows)
        size = -(-len(rows) // num_batches)
        completions: dict[int, Completion] = {}
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            prompts = {row.request: requests[row.request].token_ids_T for row in batch}
            results = DecodeLoop(self._weights, batch, params, respond).run(prompts, self._compact_below)
            completions |= {row.number: result for row, result in zip(batch, results, strict=True)}
        ordered = iter(completions[number] for number in range(len(rows)))
        return [[next(ordered) for _ in range(request.num_samples)] for request in requests]


def _rows(requests: Sequence[SampleRequest], params: SamplingParams, shape: ModelShape) -> list[Row]:
    rows: list[Row] = []
    for index, request in enumerate(requests):
        room = shape.max_position_embeddings - len(request.token_ids_T)
        if room < 1:
            raise ValueError(
                f"prompt {index} has {len(request.token_ids_T)} tokens, the model's context holds "
                f"{shape.max_position_embeddings}: shorten the prompt or raise max_position_embeddings"
            )
        if not 0 <= min(request.token_ids_T) <= max(request.token_ids_T) < shape.vocab_size:
            raise ValueError(
                f"prompt {index} has token ids outside the model's vocabulary of {shape.vocab_size}: "
                "encode it with the model's own tokenizer"
            )
        budget = request.max_new_tokens or params.max_new_tokens
        rows += [Row(index, sample, len(rows) + sample, budget, room) for sample in range(request.num_samples)]
    return rows
