"""Group advantages against hand-computed numbers and the invariances of ALGORITHMS section 2."""

import numpy as np
import pytest

from engine.advantages import dr_grpo, grpo, rloo

ALL = [grpo, dr_grpo, rloo]


def rewards(seed: int, shape=(8,)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("advantage", ALL)
def test_advantages_sum_to_zero_and_ignore_a_shift(advantage) -> None:
    r = rewards(0)
    assert advantage(r).sum() == pytest.approx(0.0, abs=1e-12)
    assert advantage(r + 3.0) == pytest.approx(advantage(r), abs=1e-12)
    assert np.ptp(advantage(r)) > 0.5


def test_grpo_has_unit_variance_and_ignores_scale() -> None:
    r = rewards(1)
    assert grpo(r).std() == pytest.approx(1.0, abs=3e-4)
    assert grpo(100 * r) == pytest.approx(grpo(r), abs=1e-3)


@pytest.mark.parametrize("num_passed", [1, 2, 5, 7])
def test_grpo_of_a_binary_group_is_the_odds_root(num_passed: int) -> None:
    p = num_passed / 8
    a = grpo(np.array([1.0] * num_passed + [0.0] * (8 - num_passed)))
    assert a[0] == pytest.approx(np.sqrt((1 - p) / p), rel=1e-3)
    assert a[-1] == pytest.approx(-np.sqrt(p / (1 - p)), rel=1e-3)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    r = np.array([1.0, 0.0, 0.5, -1.0])
    assert rloo(r) == pytest.approx([1 - (-0.5 / 3), 0 - 0.5 / 3, 0.5 - 0, -1 - 0.5], abs=1e-12)
    assert rloo(r) == pytest.approx(4 / 3 * (r - r.mean()), abs=1e-12)


def test_dr_grpo_is_centred_and_not_divided() -> None:
    assert dr_grpo(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("advantage", ALL)
def test_infrastructure_failure_leaves_the_loss_and_the_baseline(advantage) -> None:
    r = np.array([1.0, 0.0, 0.0, 0.0, 1.0])
    infra = np.array([False, False, True, False, False])
    a = advantage(r, infra)
    assert a[2] == 0.0
    assert np.delete(a, 2) == pytest.approx(advantage(np.delete(r, 2)))
    r[2] = np.nan  # whatever stands there is never read
    assert advantage(r, infra) == pytest.approx(a)


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("value", [0.1, 1.0, -1.0, 1 / 3])
def test_a_group_without_variance_is_exactly_zero(advantage, value: float) -> None:
    assert not advantage(np.full(7, value)).any()


@pytest.mark.parametrize("advantage", ALL)
def test_a_group_with_one_or_no_graded_rollout_is_zero(advantage) -> None:
    r = np.array([1.0, 0.0, 0.0])
    assert not advantage(r, np.array([False, True, True])).any()
    assert not advantage(r, np.array([True, True, True])).any()


@pytest.mark.parametrize("advantage", ALL)
def test_groups_of_several_prompts_do_not_mix(advantage) -> None:
    r, infra = rewards(2, (3, 6)), np.random.default_rng(3).random((3, 6)) < 0.3
    expected = np.stack([advantage(row, mask) for row, mask in zip(r, infra, strict=True)])
    assert advantage(r, infra) == pytest.approx(expected)


@pytest.mark.parametrize("advantage", ALL)
def test_arguments_are_not_changed_and_bad_ones_refused(advantage) -> None:
    r, infra = rewards(4), np.zeros(8, bool)
    kept = r.copy()
    advantage(r, infra)
    assert (r == kept).all()
    with pytest.raises(ValueError, match="shape"):
        advantage(r, infra[:3])
    r[1] = np.inf
    with pytest.raises(ValueError, match="finite"):
        advantage(r, infra)
