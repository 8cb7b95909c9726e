"""Token budgets: the quantile by hand, and the stage that measures them."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.tasks import general
from data.types import Group, Prompt, Rollout, Verdict
from engine.budget import budget_of, load_budgets, measure

CONFIG = {
    "seed": 2,
    "efforts": ["low", "high", "max"],
    "num_tasks": 16,
    "quantile": {"low": 0.75, "high": 0.75, "max": 0.75},
    "scale": {"low": 1.0, "high": 1.5, "max": 2.0},
    "max_new_tokens": 32,
    "max_turns": 4,
}


def group_of(finished: list[int], cut_off: list[int] = ()) -> Group:
    """A group whose rollouts sampled so many tokens each, after a prompt of two and one inserted token."""
    rollouts = []
    for reason, lengths in (("stop", finished), ("length", cut_off)):
        for n in lengths:
            total = n + 3
            mask = (False, False, False, *(True,) * n)
            rollouts.append(Rollout("p", 2, (1,) * total, mask, (0.0,) * total, (), reason, 1))
    prompt = Prompt(general.make_task(0, 0, "train"), "high", (1, 2))
    return Group(prompt, tuple(rollouts), (Verdict("fail", 0.0),) * len(rollouts))


@pytest.mark.parametrize(
    ("quantile", "scale", "expected"),
    [
        (1.0, 1.0, 9),
        (0.0, 1.0, 3),
        (0.75, 1.0, 9),  # position 2.25 of 3, 5, 7, 9: the next higher one
        (2 / 3, 1.0, 7),
        (0.5, 1.0, 7),  # position 1.5
        (0.5, 2.0, 14),
        (0.0, 1.5, 5),  # ceil(4.5)
        (1.0, 0.01, 1),
    ],
)
def test_budget_by_hand(quantile: float, scale: float, expected: int) -> None:
    assert budget_of([group_of([9, 3]), group_of([7, 5])], quantile, scale) == expected


def test_what_was_cut_off_says_nothing_about_the_length() -> None:
    assert budget_of([group_of([3, 5], cut_off=[32, 32, 32])], 1.0, 1.0) == 5


def test_a_cell_that_never_finished_is_named_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"no rollout of general/high: .* raise budget\.max_new_tokens"):
        budget_of([group_of([], cut_off=[32])], 0.5, 1.0)


def measured(new_request: Any, base_path: Path, tasks: dict[str, Path], **changes: Any) -> Path:
    request = new_request("budget", CONFIG | changes, {"model": base_path, **tasks})
    metrics = measure(request)
    assert metrics == {f"budget/{cell}": float(n) for cell, n in load_budgets(request.output_path).items()}
    return request.output_path


def test_every_cell_is_measured_on_train_tasks_alone_and_always_alike(
    new_request: Any, base_path: Path, task_paths: dict[str, Path], tmp_path: Path
) -> None:
    train_only = {}
    for role, path in task_paths.items():
        train_only[role] = tmp_path / role
        train_only[role].mkdir(parents=True)
        (train_only[role] / "train").symlink_to(path / "train")
    first = measured(new_request, base_path, train_only)
    budgets = load_budgets(first)
    assert set(budgets) == {f"{d}/{e}" for d in ("coding", "general", "research") for e in CONFIG["efforts"]}
    assert all(1 <= n <= 2 * CONFIG["max_new_tokens"] for n in budgets.values())
    again = measured(new_request, base_path, train_only)
    assert (again / "budgets.json").read_bytes() == (first / "budgets.json").read_bytes()


def test_scale_stretches_the_same_measurement(new_request: Any, base_path: Path, task_paths: dict[str, Path]) -> None:
    plain = load_budgets(measured(new_request, base_path, task_paths, scale=dict.fromkeys(CONFIG["efforts"], 1.0)))
    tripled = load_budgets(measured(new_request, base_path, task_paths, scale=dict.fromkeys(CONFIG["efforts"], 3.0)))
    assert tripled == {cell: 3 * n for cell, n in plain.items()}
    assert json.dumps(plain) != json.dumps(tripled)
