"""The figures of the matrix: base, expert and student in every cell, and the recovery of the experts' gain."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data.statistics import Estimate, Paired, mean_recovery, recovery
from flows.report.inputs import MODES, Evaluation, Inputs

MODELS = ("base", "expert", "student")
MIN_GAP = 0.05
Figures = dict[str, Any]


def cell_figures(inputs: Inputs) -> dict[str, Figures]:
    """For every cell and mode: the three models' scores, and the recovery with its interval (None: no gap)."""
    figures: dict[str, Figures] = {}
    for cell in inputs.cells:
        figures[cell] = {}
        for mode in MODES:
            scores = {name: model.cells[cell].get(mode) for name, model in _models(inputs, cell).items()}
            if any(score is None for score in scores.values()):
                continue
            found = recovery(pair(inputs, cell, mode), MIN_GAP, seed=_seed(inputs, cell))
            figures[cell][mode] = scores | {"recovery": _row(found)}
    return figures


def summary_figures(inputs: Inputs, cells: Mapping[str, Figures]) -> dict[str, Figures]:
    """For every mode: mean accuracy and tokens of the three models over the cells, and the mean recovery."""
    summary: dict[str, Figures] = {}
    for mode in MODES:
        scored = [cell for cell in cells if mode in cells[cell]]
        if not scored:
            continue
        pairs = [pair(inputs, cell, mode) for cell in scored]
        found = mean_recovery(pairs, [_seed(inputs, cell) for cell in scored], MIN_GAP)
        known = {c: cells[c][mode]["recovery"]["value"] for c in scored if cells[c][mode]["recovery"]}
        worst = min(known, key=lambda c: known[c], default=None)
        summary[mode] = {
            "accuracy": {m: _mean(cells[c][mode][m]["accuracy"] for c in scored) for m in MODELS},
            "tokens": {m: _mean(cells[c][mode][m]["tokens"] for c in scored) for m in MODELS},
            "recovery": _row(found),
            "worst": None if worst is None else {"cell": worst, "recovery": known[worst]},
            "num_cells": len(scored),
            "num_cells_with_gap": len(known),
        }
    return summary


def discovery_figures(cells: Mapping[str, Figures]) -> Figures:
    """Cells whose expert gets more right in one sample than the base in the best of ``k``: more than sharpening."""
    ks = [int(k) for modes in cells.values() for k in modes["sampled"]["base"]["pass_at_k"]]
    k = max(ks, default=1)
    beyond = [
        cell
        for cell, modes in cells.items()
        if modes["sampled"]["expert"]["accuracy"] > modes["sampled"]["base"]["pass_at_k"].get(str(k), 1.0)
    ]
    return {"k": k, "cells": beyond}


def full_matrix(inputs: Inputs) -> list[Figures]:
    """Every model in every cell at T = 1: one row a model, a None where it was not scored."""
    rows = {"base": inputs.base, **inputs.experts, "student": inputs.student}
    return [
        {"model": name, "scores": [model.cells.get(cell, {}).get("sampled") for cell in inputs.cells]}
        for name, model in rows.items()
    ]


def pair(inputs: Inputs, cell: str, mode: str) -> Paired:
    """The three models' accuracy on the tasks that all of them were scored on."""
    scored = [model.by_task(cell, mode) for model in _models(inputs, cell).values()]
    tasks = sorted(set.intersection(*(set(tasks) for tasks in scored)))
    if not tasks:
        raise ValueError(f"base, expert and student share no {mode} task in {cell}; evaluate them with one recipe")
    return Paired(*(np.array([tasks_of[task] for task in tasks]) for tasks_of in scored))


def _models(inputs: Inputs, cell: str) -> Mapping[str, Evaluation]:
    return dict(zip(MODELS, (inputs.base, inputs.experts[cell], inputs.student), strict=True))


def _seed(inputs: Inputs, cell: str) -> int:
    """Cells of one domain are scored on the same tasks, so they are resampled together."""
    return inputs.domains.index(cell.split("/")[0])


def _row(found: Estimate | None) -> Figures | None:
    return None if found is None else found._asdict()


def _mean(values: Sequence[float] | Any) -> float:
    return float(np.mean(list(values)))
