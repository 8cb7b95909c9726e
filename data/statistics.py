"""Statistics of evaluations: unbiased pass@k, means with intervals over tasks, recovery of a merged student.

Legend: P tasks, R bootstrap resamples. A task's rollouts are not independent, so tasks (clusters) are resampled, never
rollouts. Intervals are percentile intervals at 95 %.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 2000
_TAILS = (2.5, 97.5)


class Estimate(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


class Paired(NamedTuple):
    """Accuracies of three models on the same P tasks, in the same order."""

    base_P: Floats
    expert_P: Floats
    student_P: Floats


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of k rollouts passes, unbiased: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Raises ValueError unless 1 <= k <= num_samples and 0 <= num_correct <= num_samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} right in {num_samples} is undefined; sample at least k per task")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def bootstrap_mean(values_P: ArrayLike, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """Mean of one value a task, with its interval. Raises ValueError when there is no task or a value is not finite."""
    checked_P = _checked(values_P)
    means_R = _resample(len(checked_P), num_resamples, seed) @ checked_P
    return _estimate(float(checked_P.mean()), means_R)


def recovery(cell: Paired, min_gap: float = 0.05, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Estimate | None:
    """(student - base) / (expert - base) with its paired interval; None where there is no gap to recover.

    No gap: expert - base is below ``min_gap``, or its own interval reaches 0, so that the ratio would be noise.
    Raises ValueError when the three do not have the same tasks.
    """
    found = _recovery_draws(cell, min_gap, num_resamples, seed)
    return None if found is None else _estimate(*found)


def mean_recovery(
    cells: Sequence[Paired], seeds: Sequence[int], min_gap: float = 0.05, num_resamples: int = NUM_RESAMPLES
) -> Estimate | None:
    """Mean recovery over the cells that have a gap; None when none has.

    Cells on the same tasks are given the same seed: they are then resampled together, as their errors are related.
    """
    found = [_recovery_draws(cell, min_gap, num_resamples, seed) for cell, seed in zip(cells, seeds, strict=True)]
    drawn = [pair for pair in found if pair is not None]
    if not drawn:
        return None
    return _estimate(float(np.mean([value for value, _ in drawn])), np.mean([draws_R for _, draws_R in drawn], axis=0))


def _recovery_draws(cell: Paired, min_gap: float, num_resamples: int, seed: int) -> tuple[float, Floats] | None:
    """The ratio and its resamples (NaN where a resample happens to have no gap)."""
    base_P, expert_P, student_P = (_checked(values_P) for values_P in cell)
    if not len(base_P) == len(expert_P) == len(student_P):
        raise ValueError(
            f"recovery needs the same tasks for base, expert and student: {[len(c) for c in cell]} were given"
        )
    weights_RP = _resample(len(base_P), num_resamples, seed)
    gap_R = weights_RP @ (expert_P - base_P)
    gap = float((expert_P - base_P).mean())
    if gap < min_gap or np.percentile(gap_R, _TAILS[0]) <= 0:
        return None
    gained_R = weights_RP @ (student_P - base_P)
    draws_R = np.divide(gained_R, gap_R, out=np.full_like(gap_R, np.nan), where=gap_R > 0)
    return float((student_P - base_P).mean()) / gap, draws_R


@lru_cache(maxsize=8)
def _resample(num_tasks: int, num_resamples: int, seed: int) -> Floats:
    """Weights (R, P): how often a resample drew each task, over P. Drawn once for all cells that share them."""
    rng = np.random.default_rng(seed)
    weights_RP: Floats = rng.multinomial(num_tasks, np.full(num_tasks, 1.0 / num_tasks), size=num_resamples) / num_tasks
    weights_RP.setflags(write=False)
    return weights_RP


def _estimate(value: float, draws_R: Floats) -> Estimate:
    low, high = np.nanpercentile(draws_R, _TAILS)
    return Estimate(value, float(low), float(high))


def _checked(values_P: ArrayLike) -> Floats:
    array_P = np.asarray(values_P, dtype=np.float64)
    if array_P.ndim != 1 or not array_P.size or not np.isfinite(array_P).all():
        raise ValueError(f"expected one finite value a task, got an array of shape {array_P.shape}: {array_P[:5]}…")
    return array_P
