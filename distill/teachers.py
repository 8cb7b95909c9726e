"""Teachers: frozen experts, each the only one of its (domain, effort), that score the student's own samples."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data.types import Sample
from engine.batches import by_sample, pack
from engine.losses import log_softmax
from engine.model import Qwen3
from engine.trainer import trained_logits
from engine.weights import load_model


class Teachers:
    """One frozen model per cell. There is no default teacher.

    Raises ValueError when a cell has none, or when a teacher's vocabulary is not the student's.
    """

    def __init__(self, folders: Mapping[str, Path], cells: Sequence[str], vocab_size: int, tokens_per_micro_batch: int):
        missing = sorted(set(cells) - folders.keys())
        if missing:
            raise ValueError(
                f"no teacher for {missing}; the merge has {sorted(folders)}: add the expert or drop the cell"
            )
        self._models = {cell: _load_frozen(folders[cell]) for cell in cells}
        self._tokens_per_micro_batch = tokens_per_micro_batch
        for cell, model in self._models.items():
            if model.shape.vocab_size != vocab_size:
                raise ValueError(f"teacher {cell} has {model.shape.vocab_size} tokens, the student {vocab_size}")

    @torch.inference_mode()
    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, in order, each with its own teacher's log-distribution at every trained token (fp32, T = 1).

        Raises ValueError for a sample of a cell that has no teacher.
        """
        members: dict[str, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            members[f"{sample.domain}/{sample.effort}"].append(index)
        unknown = sorted(members.keys() - self._models.keys())
        if unknown:
            raise ValueError(f"no teacher for samples of {unknown}; there are {sorted(self._models)}")
        scored = list(samples)
        for cell, indices in members.items():
            batches = pack([samples[i] for i in indices], self._tokens_per_micro_batch)
            logprobs = [log_softmax(trained_logits(self._models[cell], batch)) for batch in batches]
            for position, logprobs_NV in by_sample(batches, logprobs):
                index = indices[position]
                scored[index] = replace(samples[index], teacher=cell, teacher_logprobs_NV=logprobs_NV.numpy())
        return scored


def _load_frozen(folder: Path) -> Qwen3:
    return load_model(folder).eval().requires_grad_(False)
