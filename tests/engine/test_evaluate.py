"""Evaluation: scores by hand, and the stage's row of the matrix."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.arrow import load_rows
from data.stages import load_tasks
from data.tasks import general
from data.types import Group, Prompt, Rollout, Verdict
from engine.evaluate import evaluate, score

CELLS = ["general/low", "coding/high"]
OTHER_CELLS = ["research/max"]
CONFIG = {
    "seed": 9,
    "cells": CELLS,
    "other_cells": OTHER_CELLS,
    "num_tasks": 12,
    "num_tasks_other": 5,
    "samples_per_task": 3,
    "max_turns": 4,
}


def group_of(outcomes: str, num_tokens: int = 4, cut_off: int = 0) -> Group:
    """Rollouts by their outcome's letter (p, f, i), of so many tokens each; the last ``cut_off`` of them cut off."""
    names = {"p": "pass", "f": "fail", "i": "infra"}
    reasons = ["stop"] * (len(outcomes) - cut_off) + ["length"] * cut_off
    mask = (False, False, *(True,) * num_tokens)
    zeros = (0.0,) * len(mask)
    return Group(
        Prompt(general.make_task(0, 0, "test"), "low", (1, 2)),
        tuple(Rollout("p", 2, (1,) * len(mask), mask, zeros, (), reason, 1) for reason in reasons),
        tuple(Verdict(names[letter], float(letter == "p")) for letter in outcomes),
    )


def test_score_by_hand() -> None:
    scores = score([group_of("pppp", 2), group_of("pfff", 6), group_of("ffff", 10, cut_off=3)])
    assert scores["accuracy"] == pytest.approx((1 + 1 / 4 + 0) / 3)
    assert scores["low"] <= scores["accuracy"] <= scores["high"]
    assert (scores["low"], scores["high"]) == (pytest.approx(0.0), pytest.approx(1.0))
    assert scores["tokens"] == 6.0
    assert scores["truncated"] == pytest.approx(3 / 12)
    assert (scores["num_tasks"], scores["samples_per_task"], scores["infra"]) == (3, 4, 0)
    assert scores["pass_at_k"] == {
        "1": pytest.approx(5 / 12),
        "2": pytest.approx((1 + 1 / 2 + 0) / 3),  # 1 - C(3, 2) / C(4, 2)
        "4": pytest.approx(2 / 3),
    }


def test_infra_counts_neither_way() -> None:
    graded = score([group_of("pf"), group_of("ff")])
    with_infra = score([group_of("pfii"), group_of("ffi"), group_of("iii")])
    assert with_infra["accuracy"] == graded["accuracy"] == 0.25
    assert with_infra["pass_at_k"] == graded["pass_at_k"]
    assert (with_infra["num_tasks"], with_infra["infra"]) == (2, 6)
    assert (graded["num_tasks"], graded["infra"]) == (2, 0)


def test_a_cell_without_any_graded_rollout_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no rollout of general/low could be graded"):
        score([group_of("ii"), group_of("i")])


@pytest.fixture(scope="module")
def evaluated(new_request: Any, base_path: Path, budget_path: Path, task_paths: dict[str, Path]) -> Path:
    request = new_request("evaluate", CONFIG, {"model": base_path, "budget": budget_path, **task_paths})
    metrics = evaluate(request)
    cells = json.loads((request.output_path / "cells.json").read_text())
    assert metrics == {f"accuracy/{cell}": cells[cell]["sampled"]["accuracy"] for cell in CELLS}
    return request.output_path


def test_own_cells_are_scored_in_full_and_the_others_sampled_only(evaluated: Path) -> None:
    cells = json.loads((evaluated / "cells.json").read_text())
    assert {cell: set(modes) for cell, modes in cells.items()} == {
        "general/low": {"sampled", "greedy"},
        "coding/high": {"sampled", "greedy"},
        "research/max": {"sampled"},
    }
    for cell in CELLS:
        assert (cells[cell]["sampled"]["num_tasks"], cells[cell]["sampled"]["samples_per_task"]) == (12, 3)
        assert (cells[cell]["greedy"]["num_tasks"], cells[cell]["greedy"]["samples_per_task"]) == (12, 1)
    assert cells["research/max"]["sampled"]["num_tasks"] == 5


def test_every_rollout_is_kept_and_adds_up_to_the_scores(evaluated: Path, budget_path: Path) -> None:
    rows, cells = load_rows(evaluated / "rollouts"), json.loads((evaluated / "cells.json").read_text())
    budgets = json.loads((budget_path / "budgets.json").read_text())
    assert len(rows) == 2 * 12 * (3 + 1) + 5 * 3
    for cell, modes in cells.items():
        for mode, scores in modes.items():
            own = [r for r in rows if (f"{r['domain']}/{r['effort']}", r["mode"]) == (cell, mode)]
            assert scores["accuracy"] == pytest.approx(sum(r["outcome"] == "pass" for r in own) / len(own))
            assert scores["tokens"] == pytest.approx(sum(r["num_tokens"] for r in own) / len(own))
            assert max(r["num_tokens"] for r in own) <= budgets[cell]
            assert {r["sample"] for r in own} == set(range(scores["samples_per_task"]))


def test_only_held_out_tasks_are_used_the_first_ones_in_order(evaluated: Path, task_paths: dict[str, Path]) -> None:
    rows = load_rows(evaluated / "rollouts")
    for cell, num in (("general/low", 12), ("coding/high", 12), ("research/max", 5)):
        domain = cell.split("/")[0]
        held_out = [task.id for task in load_tasks(task_paths[f"tasks/{domain}"], "test")]
        used = [r["task_id"] for r in rows if r["domain"] == domain and r["mode"] == "sampled"]
        assert list(dict.fromkeys(used)) == held_out[:num]


def test_it_repeats_itself_and_cells_do_not_depend_on_each_other(
    new_request: Any, base_path: Path, budget_path: Path, task_paths: dict[str, Path], evaluated: Path
) -> None:
    inputs = {"model": base_path, "budget": budget_path, **task_paths}
    again = new_request("evaluate", CONFIG, inputs)
    evaluate(again)
    for path in sorted(p for p in evaluated.rglob("*") if p.is_file()):
        assert (again.output_path / path.relative_to(evaluated)).read_bytes() == path.read_bytes()
    alone = new_request("evaluate", CONFIG | {"cells": ["coding/high"], "other_cells": []}, inputs)
    evaluate(alone)
    cells = json.loads((evaluated / "cells.json").read_text())
    assert json.loads((alone.output_path / "cells.json").read_text()) == {"coding/high": cells["coding/high"]}


def test_a_smaller_budget_cuts_rollouts_off(
    new_request: Any, base_path: Path, task_paths: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "budgets.json").write_text(json.dumps({"general/low": 2}))
    config = CONFIG | {"cells": ["general/low"], "other_cells": []}
    request = new_request("evaluate", config, {"model": base_path, "budget": tmp_path, **task_paths})
    evaluate(request)
    scores = json.loads((request.output_path / "cells.json").read_text())["general/low"]["sampled"]
    assert (scores["truncated"], scores["accuracy"], scores["tokens"]) == (1.0, 0.0, 2.0)


def test_score_does_not_depend_on_the_order_within_a_group() -> None:
    group = group_of("pfpf")
    turned = replace(group, rollouts_G=group.rollouts_G[::-1], verdicts_G=group.verdicts_G[::-1])
    assert score([group]) == score([turned])
