"""Samples to micro-batches of padded rows. The only place that shifts: token t is predicted at position t - 1.

Legend: B rows, T positions of a row, N trained tokens of the micro-batch (sample by sample, in order), V vocabulary.
Padding is on the right and may hold any token: causal attention keeps it from every earlier position, and no loss is
ever masked by a token's identity, so that pad and end of sequence may be one token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.types import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch. ``sample_ids`` are the rows' indices in the packed sequence, ``counts`` their trained tokens.

    ``source_N`` points into the flattened (B x T) hidden states: the position that predicts each trained token.
    ``num_loss_tokens`` is global: over all micro-batches and ranks.
    """

    token_ids_BT: Int[Tensor, "b t"]
    position_ids_BT: Int[Tensor, "b t"]
    segment_ids_BT: Int[Tensor, "b t"] | None
    source_N: Int[Tensor, " n"]
    target_ids_N: Int[Tensor, " n"]
    sampler_logprobs_N: Float[Tensor, " n"]
    advantages_N: Float[Tensor, " n"]
    teacher_logprobs_NV: Float[Tensor, "n v"] | None
    sample_ids: tuple[int, ...]
    counts: tuple[int, ...]
    num_loss_tokens: int


def count_loss_tokens(samples: Sequence[Sample]) -> int:
    """Trained tokens of all samples."""
    return sum(sum(sample.loss_mask_T) for sample in samples)


def pack(samples: Sequence[Sample], tokens_per_micro_batch: int, num_loss_tokens: int | None = None) -> list[Batch]:
    """Length-sorted micro-batches of at most ``tokens_per_micro_batch`` padded positions (one row may exceed it).

    Positions that predict nothing (the last trained token and all after it) are cut off; samples without a trained
    token are left out. ``num_loss_tokens`` is the global count, by default that of ``samples``; it is given when they
    are one rank's share. Raises ValueError for a budget below 1 or a malformed sample, naming its index.
    """
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch must be at least 1: {tokens_per_micro_batch}")
    lengths = [_checked_length(index, sample) for index, sample in enumerate(samples)]
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (lengths[i], i))
    if num_loss_tokens is None:
        num_loss_tokens = count_loss_tokens(samples)
    rows: list[list[int]] = []
    for i in order:
        if not rows or (len(rows[-1]) + 1) * lengths[i] > tokens_per_micro_batch:
            rows.append([])
        rows[-1].append(i)
    return [_collate(samples, lengths, ids, num_loss_tokens) for ids in rows]


def by_sample(batches: Sequence[Batch], values: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """(index of the sample, its stretch of a per-token tensor (N, ...)) for every packed sample, in packed order."""
    for batch, value in zip(batches, values, strict=True):
        yield from zip(batch.sample_ids, torch.split(value, list(batch.counts)), strict=True)


def _checked_length(index: int, sample: Sample) -> int:
    """Positions needed as inputs: up to the one that predicts the last trained token; 0 when none is trained."""
    length = len(sample.token_ids_T)
    fields = (sample.loss_mask_T, sample.sampler_logprobs_T, sample.advantages_T)
    if any(len(field) != length for field in fields):
        sizes = [len(field) for field in fields]
        raise ValueError(f"sample {index}: {length} tokens, but mask, log-probabilities and advantages have {sizes}")
    if not any(sample.loss_mask_T):
        return 0
    if sample.loss_mask_T[0]:
        raise ValueError(f"sample {index}: its first token is trained, but nothing predicts it")
    if sample.teacher_logprobs_NV is not None and len(sample.teacher_logprobs_NV) != sum(sample.loss_mask_T):
        rows, trained = len(sample.teacher_logprobs_NV), sum(sample.loss_mask_T)
        raise ValueError(f"sample {index}: the teacher scored {rows} tokens, but {trained} are trained")
    return length - 1 - sample.loss_mask_T[::-1].index(True)


def _collate(samples: Sequence[Sample], lengths: Sequence[int], ids: Sequence[int], num_loss_tokens: int) -> Batch:
    chosen = [samples[i] for i in ids]
    B, T = len(ids), max(lengths[i] for i in ids)
    token_ids_BT = np.zeros((B, T), np.int64)
    predicts_BT = np.zeros((B, T), bool)
    for row, (i, sample) in enumerate(zip(ids, chosen, strict=True)):
        token_ids_BT[row, : lengths[i]] = sample.token_ids_T[: lengths[i]]
        predicts_BT[row, : lengths[i]] = sample.loss_mask_T[1 : lengths[i] + 1]

    def trained(fields: Iterable[Sequence[float]], dtype: type) -> Tensor:
        values = chain.from_iterable(compress(f, s.loss_mask_T) for f, s in zip(fields, chosen, strict=True))
        return torch.from_numpy(np.fromiter(values, dtype))

    return Batch(
        token_ids_BT=torch.from_numpy(token_ids_BT),
        position_ids_BT=torch.arange(T).expand(B, T),
        segment_ids_BT=None,
        source_N=torch.from_numpy(np.flatnonzero(predicts_BT)),
        target_ids_N=trained((s.token_ids_T for s in chosen), np.int64),
        sampler_logprobs_N=trained((s.sampler_logprobs_T for s in chosen), np.float32),
        advantages_N=trained((s.advantages_T for s in chosen), np.float32),
        teacher_logprobs_NV=_teacher_logprobs(chosen, ids),
        sample_ids=tuple(ids),
        counts=tuple(predicts_BT.sum(1).tolist()),
        num_loss_tokens=num_loss_tokens,
    )


def _teacher_logprobs(chosen: Sequence[Sample], ids: Sequence[int]) -> Tensor | None:
    rows = [s.teacher_logprobs_NV for s in chosen if s.teacher_logprobs_NV is not None]
    if not rows:
        return None
    if len(rows) < len(chosen):
        missing = [i for i, s in zip(ids, chosen, strict=True) if s.teacher_logprobs_NV is None]
        raise ValueError(f"samples {missing} lack the teacher's log-probabilities, others have them: score all of them")
    return torch.from_numpy(np.concatenate(rows))
