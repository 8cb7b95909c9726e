"""What the report is made from: evaluations, stored rollouts, and the logs and records beside the stages' outputs."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data.arrow import load_rows
from data.stage import StageRequest

Row = Mapping[str, Any]
MODES = ("sampled", "greedy")


@dataclass(frozen=True)
class Stage:
    """A stage's name, its record (empty when it left none) and its metrics, one row a step."""

    name: str
    record: Mapping[str, Any]
    metrics: Sequence[Row]


@dataclass(frozen=True)
class Evaluation:
    """One model's scores by cell and mode, and the rollouts behind them."""

    cells: Mapping[str, Mapping[str, Mapping[str, Any]]]
    rollouts: Sequence[Row]

    def by_task(self, cell: str, mode: str) -> dict[str, float]:
        """Share of passed rollouts of every task; rollouts with an infra verdict are left out."""
        outcomes: dict[str, list[bool]] = defaultdict(list)
        for row in self._of_cell[cell, mode]:
            if row["outcome"] != "infra":
                outcomes[row["task_id"]].append(row["outcome"] == "pass")
        return {task: sum(passed) / len(passed) for task, passed in outcomes.items()}

    def first_rollouts(self, cell: str, mode: str) -> dict[str, Row]:
        """The first rollout of every task."""
        return {row["task_id"]: row for row in self._of_cell[cell, mode] if row["sample"] == 0}

    @cached_property
    def _of_cell(self) -> Mapping[tuple[str, str], list[Row]]:
        rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rollouts:
            rows[f"{row['domain']}/{row['effort']}", row["mode"]].append(row)
        return rows


@dataclass(frozen=True)
class Inputs:
    """Everything by name. ``cells`` is in the recipe's order: domains, and in each the efforts from small to large.

    ``budgets`` are tokens by cell; empty, like ``recipe``, and ``seed`` None where the request does not say.
    """

    cells: tuple[str, ...]
    base: Evaluation
    student: Evaluation
    experts: Mapping[str, Evaluation]
    training: Mapping[str, Stage]
    training_rollouts: Mapping[str, Sequence[Row]]
    midtrain: Stage | None
    distill: Stage | None
    stages: Sequence[Stage]
    budgets: Mapping[str, int]
    recipe: str
    seed: int | None

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.split("/")[0] for cell in self.cells))

    @property
    def efforts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.split("/")[1] for cell in self.cells))

    def cells_of(self, domain: str) -> tuple[str, ...]:
        return tuple(cell for cell in self.cells if cell.split("/")[0] == domain)


def read_inputs(request: StageRequest) -> Inputs:
    """Reads every input. Raises ValueError when a file is missing or no cell has a base, an expert and a student."""
    base, student = (_read_evaluation(request.input(role)) for role in ("base", "student"))
    experts = {cell: _read_evaluation(path) for cell, path in _with_prefix(request, "expert/").items()}
    trained = _with_prefix(request, "rollouts/")
    stages = {role: read_stage(path.parent, role) for role, path in request.inputs.items()}
    order = stages["base"].record.get("config", {}).get("cells", base.cells)
    cells = tuple(c for c in order if c in base.cells and c in student.cells and c in experts)
    if not cells:
        raise ValueError(f"no cell has all three of base, expert and student; the experts are {sorted(experts)}")
    return Inputs(
        cells=cells,
        base=base,
        student=student,
        experts={cell: experts[cell] for cell in cells},
        training={cell: stages[f"rollouts/{cell}"] for cell in cells if cell in trained},
        training_rollouts={cell: load_rows(trained[cell] / "rollouts") for cell in cells if cell in trained},
        midtrain=stages.get("midtrain"),
        distill=stages.get("distill"),
        stages=list(stages.values()),
        budgets=_read_budgets(request),
        recipe=request.config.get("recipe", ""),
        seed=request.config.get("seed"),
    )


def read_stage(folder: Path, role: str) -> Stage:
    """The stage whose folder this is; without a record it is called by its role."""
    record_path, metrics_path = folder / "record.json", folder / "metrics.jsonl"
    record = json.loads(record_path.read_text()) if record_path.exists() else {}
    lines = metrics_path.read_text().splitlines() if metrics_path.exists() else []
    return Stage(record.get("stage", role), record, [json.loads(line) for line in lines])


def _with_prefix(request: StageRequest, prefix: str) -> dict[str, Path]:
    return {role.removeprefix(prefix): path for role, path in request.inputs.items() if role.startswith(prefix)}


def _read_budgets(request: StageRequest) -> Mapping[str, int]:
    if "budget" not in request.inputs:
        return {}
    budgets: dict[str, int] = json.loads((request.input("budget") / "budgets.json").read_text())
    return budgets


def _read_evaluation(folder: Path) -> Evaluation:
    path = folder / "cells.json"
    if not path.exists():
        raise ValueError(f"{path} is missing: the input is not an evaluation's output; run that stage again")
    return Evaluation(json.loads(path.read_text()), load_rows(folder / "rollouts"))
