"""Samples to micro-batches. The only place that shifts: token t is predicted by the state after token t - 1.

Legend: B rows, T positions of a row, N trained tokens of the micro-batch (sample by sample, in order), U states that
predict them (samples with a common prefix share its states), V vocabulary.
Padding may hold any token: nothing sees it, and no loss is ever masked by a token's identity, so that pad and end of
sequence may be one token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from data.types import Sample
from engine.prefixes import Row, share_prefixes

MIN_ROW_SIZE = 128


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch. ``sample_ids`` are the samples' indices in the packed sequence, ``counts`` their trained tokens.

    ``visible_BTT[b, i, j]`` says that position i attends to position j; None where every row is one causal sequence.
    ``source_U`` points into the flattened (B x T) hidden states: the states that predict trained tokens. ``state_N``
    points into those U: the state that predicts each trained token; where U = N it is 0, 1, 2, ... The number of
    trained tokens ``num_loss_tokens`` is global: over all micro-batches and ranks.
    """

    token_ids_BT: Int[Tensor, "b t"]
    position_ids_BT: Int[Tensor, "b t"]
    visible_BTT: Bool[Tensor, "b t t"] | None
    source_U: Int[Tensor, " u"]
    state_N: Int[Tensor, " n"]
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
    """Micro-batches of at most ``tokens_per_micro_batch`` positions (a longer sample makes one of its own).

    Samples that begin alike share a row and its positions. Positions that predict nothing (the last trained token and
    all after it) are cut off; samples without a trained token are left out. ``num_loss_tokens`` is the global count, by
    default that of ``samples``; it is given when they are one rank's share. Raises ValueError for a budget below 1 or a
    malformed sample, naming its index.
    """
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch must be at least 1: {tokens_per_micro_batch}")
    lengths = [_checked_length(index, sample) for index, sample in enumerate(samples)]
    inputs = {i: samples[i].token_ids_T[:length] for i, length in enumerate(lengths) if length}
    row_size = min(tokens_per_micro_batch, max(MIN_ROW_SIZE, 2 * max(lengths, default=0)))
    if num_loss_tokens is None:
        num_loss_tokens = count_loss_tokens(samples)
    batches: list[list[Row]] = []
    for row in share_prefixes(inputs, row_size):
        if not batches or (len(batches[-1]) + 1) * len(row) > tokens_per_micro_batch:
            batches.append([])
        batches[-1].append(row)
    return [_collate(samples, rows, num_loss_tokens) for rows in batches]


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
    return int(_predicts(sample)[-1]) + 1


def _collate(samples: Sequence[Sample], rows: Sequence[Row], num_loss_tokens: int) -> Batch:
    B, T = len(rows), max(map(len, rows))
    token_ids_BT, position_ids_BT = np.zeros((2, B, T), np.int64)
    for b, row in enumerate(rows):
        token_ids_BT[b, : len(row)] = row.token_ids_T
        position_ids_BT[b, : len(row)] = row.position_ids_T
    ids = [i for row in rows for i in row.paths]
    chosen = [samples[i] for i in ids]
    paths = [(b, path) for b, row in enumerate(rows) for path in row.paths.values()]
    sources = [b * T + np.array(path)[_predicts(s)] for (b, path), s in zip(paths, chosen, strict=True)]
    source_U, state_N = _distinct(np.concatenate(sources))

    def trained(fields: Iterable[Sequence[float]], dtype: type) -> Tensor:
        values = chain.from_iterable(compress(f, s.loss_mask_T) for f, s in zip(fields, chosen, strict=True))
        return torch.from_numpy(np.fromiter(values, dtype))

    return Batch(
        token_ids_BT=torch.from_numpy(token_ids_BT),
        position_ids_BT=torch.from_numpy(position_ids_BT),
        visible_BTT=_visible(rows, T),
        source_U=torch.from_numpy(source_U),
        state_N=torch.from_numpy(state_N),
        target_ids_N=trained((s.token_ids_T for s in chosen), np.int64),
        sampler_logprobs_N=trained((s.sampler_logprobs_T for s in chosen), np.float32),
        advantages_N=trained((s.advantages_T for s in chosen), np.float32),
        teacher_logprobs_NV=_teacher_logprobs(chosen, ids),
        sample_ids=tuple(ids),
        counts=tuple(sum(s.loss_mask_T) for s in chosen),
        num_loss_tokens=num_loss_tokens,
    )


def _predicts(sample: Sample) -> NDArray[np.int64]:
    """Indices of the tokens whose states predict a trained token: the shift by one."""
    return np.flatnonzero(sample.loss_mask_T) - 1


def _visible(rows: Sequence[Row], T: int) -> Tensor | None:
    if all(len(row.branches) == 1 for row in rows):
        return None
    return torch.from_numpy(np.stack([row.visible(T) for row in rows]))


def _distinct(source_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct sources in the order of their first appearance, and each trained token's index into them."""
    sources, first, inverse = np.unique(source_N, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return sources[order], rank[inverse]


def _teacher_logprobs(chosen: Sequence[Sample], ids: Sequence[int]) -> Tensor | None:
    rows = [s.teacher_logprobs_NV for s in chosen if s.teacher_logprobs_NV is not None]
    if not rows:
        return None
    if len(rows) < len(chosen):
        missing = [i for i, s in zip(ids, chosen, strict=True) if s.teacher_logprobs_NV is None]
        raise ValueError(f"samples {missing} lack the teacher's log-probabilities, others have them: score all of them")
    return torch.from_numpy(np.concatenate(rows))
