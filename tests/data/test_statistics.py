"""pass@k, bootstrap intervals and recovery against hand computation, enumeration and normal theory."""

from itertools import combinations
from math import sqrt

import numpy as np
import pytest

from data.statistics import Paired, bootstrap_mean, mean_recovery, pass_at_k, recovery


@pytest.mark.parametrize("num_correct", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_pass(num_correct: int, k: int) -> None:
    outcomes = [True] * num_correct + [False] * (6 - num_correct)
    draws = list(combinations(outcomes, k))
    assert pass_at_k(6, num_correct, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    right = np.random.default_rng(0).binomial(8, 0.3, size=20_000)
    assert np.mean([pass_at_k(8, int(c), 4) for c in right]) == pytest.approx(1 - 0.7**4, abs=0.005)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 5, 2), (4, -1, 2), (4, 2, 0)])
def test_pass_at_k_refuses_what_is_undefined(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="undefined"):
        pass_at_k(n, c, k)


def test_interval_of_the_mean_is_that_of_normal_theory() -> None:
    values = np.random.default_rng(1).random(400)
    mean, low, high = bootstrap_mean(values, 4000, seed=3)
    half = 1.96 * values.std() / sqrt(400)
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    task_rates = rng.random((300, 60))  # 4 related rollouts a task; resampling rollouts would cover too seldom
    accuracies = rng.binomial(4, task_rates) / 4
    intervals = [bootstrap_mean(row, 400, seed=i) for i, row in enumerate(accuracies)]
    assert np.mean([low <= 0.5 <= high for _, low, high in intervals]) == pytest.approx(0.945, abs=0.03)


def test_same_seed_same_interval() -> None:
    values = [0.0, 1.0, 0.5, 1.0, 0.25]
    assert bootstrap_mean(values, 100, seed=5) == bootstrap_mean(values, 100, seed=5)
    assert bootstrap_mean(values, 100, seed=5) != bootstrap_mean(values, 100, seed=6)


def test_a_constant_has_no_width_and_no_tasks_are_refused() -> None:
    assert bootstrap_mean([0.5] * 9, 50, seed=0) == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="one finite value a task"):
        bootstrap_mean([], 50, seed=0)
    with pytest.raises(ValueError, match="one finite value a task"):
        bootstrap_mean([float("nan")], 50, seed=0)


def cell(base: float, expert: float, student: float, num_tasks: int = 400) -> Paired:
    """Accuracies that keep each task's difficulty, so that the three models are related."""
    difficulty = np.linspace(-0.2, 0.2, num_tasks)
    return Paired(base + difficulty, expert + difficulty, student + difficulty)


def test_recovery_by_hand_and_without_width_when_differences_are_constant() -> None:
    assert recovery(cell(0.3, 0.7, 0.6)) == pytest.approx((0.75, 0.75, 0.75))


def test_recovery_interval_is_paired() -> None:
    rng = np.random.default_rng(4)
    base, expert, student = (rng.binomial(4, p, size=400) / 4 for p in (0.3, 0.6, 0.57))
    value, low, high = recovery(Paired(base, expert, student)) or (0, 0, 0)
    gap, gain = expert - base, student - base
    half = 1.96 * np.std(gain - value * gap) / gap.mean() / sqrt(400)  # delta method
    assert (low, high) == pytest.approx((value - half, value + half), abs=0.15 * half)


def test_no_gap_when_small_negative_or_not_established() -> None:
    assert recovery(cell(0.50, 0.52, 0.52)) is None
    assert recovery(cell(0.60, 0.40, 0.50)) is None
    noisy = Paired(np.array([0.0, 1, 1, 0, 0, 1]), np.array([1.0, 0, 1, 1, 0, 1]), np.array([1.0, 0, 1, 1, 0, 1]))
    assert recovery(noisy) is None  # 17 points on six tasks


def test_different_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="same tasks"):
        recovery(Paired(np.zeros(4), np.ones(4), np.ones(3)))


def test_mean_recovery_leaves_out_cells_without_gap() -> None:
    cells = [cell(0.3, 0.7, 0.6), cell(0.5, 0.51, 0.2), cell(0.3, 0.5, 0.55)]
    assert mean_recovery(cells, [0, 1, 2]) == pytest.approx((1.0, 1.0, 1.0))
    assert mean_recovery(cells[1:2], [0]) is None


def test_cells_on_the_same_tasks_are_resampled_together() -> None:
    rng = np.random.default_rng(5)
    one = Paired(*(rng.binomial(1, p, size=200).astype(float) for p in (0.3, 0.7, 0.6)))
    together = mean_recovery([one, one], [7, 7])
    assert together == pytest.approx(recovery(one, seed=7))
    apart = mean_recovery([one, one], [7, 8])
    assert together is not None
    assert apart is not None
    assert apart.high - apart.low < 0.85 * (together.high - together.low)
