"""Rollouts to read: one held-out task answered by base, expert and student, and what an expert tried in training."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from flows.report.inputs import Inputs, Row
from flows.report.matrix import MODELS

CHANNEL = re.compile(r"<\|(\w+)\|>")
KINDS = (
    ("learned", "The expert solved what the base could not, and the student holds it", ("fail", "pass", "pass")),
    ("lost", "The expert solves it, the student does not", (None, "pass", "fail")),
    ("gained", "The student solves it, the expert does not", (None, "fail", "pass")),
    ("open", "Nobody solves it", ("fail", "fail", "fail")),
)
MAX_TRAINING_ROLLOUTS = 4
Found = dict[str, Any]


def comparisons(inputs: Inputs) -> dict[str, Found]:
    """For every cell how many of its tasks are of each kind, and one ``case`` of each kind to read.

    Greedy where all three models were evaluated greedily, else their first sample at T = 1.
    """
    return {cell: _comparison(inputs, cell) for cell in inputs.cells}


def _comparison(inputs: Inputs, cell: str) -> Found:
    models = (inputs.base, inputs.experts[cell], inputs.student)
    mode = "greedy" if all("greedy" in model.cells[cell] for model in models) else "sampled"
    answers = [model.first_rollouts(cell, mode) for model in models]
    shared = sorted(set.intersection(*(set(found) for found in answers)))
    shared.sort(key=lambda task: -len(answers[1][task]["completion"]))  # the longest says most
    counts, cases = {}, []
    for kind, title, wanted in KINDS:
        tasks = [task for task in shared if _is_kind([of_model[task] for of_model in answers], wanted)]
        counts[kind] = len(tasks)
        if tasks:
            rows = [of_model[tasks[0]] for of_model in answers]
            cases.append(
                {
                    "kind": kind,
                    "title": title,
                    "task": tasks[0],
                    "expected": rows[0].get("answer", ""),
                    "prompt": split_channels(rows[0]["prompt"]),
                    "answers": [_shown(row) | {"model": model} for model, row in zip(MODELS, rows, strict=True)],
                }
            )
    return {"mode": mode, "num_tasks": len(shared), "counts": counts, "cases": cases}


def _is_kind(rows: Sequence[Row], wanted: Sequence[str | None]) -> bool:
    return all(want is None or row["outcome"] == want for want, row in zip(wanted, rows, strict=True))


def training_groups(inputs: Inputs) -> dict[str, list[Found]]:
    """For every cell the first stored group of the first and of the last stored step, advantages included."""
    return {cell: _groups(rows) for cell, rows in inputs.training_rollouts.items()}


def _groups(rows: Sequence[Row]) -> list[Found]:
    steps = sorted({row["step"] for row in rows})
    found = []
    for step in dict.fromkeys((steps[0], steps[-1])) if steps else ():
        of_step = [row for row in rows if row["step"] == step]
        group = [row for row in of_step if row["task_id"] == of_step[0]["task_id"]]
        shown = [_shown(row) | {"advantage": row["advantage"]} for row in group[:MAX_TRAINING_ROLLOUTS]]
        prompt = split_channels(group[0]["prompt"])
        found.append({"step": step, "num_rollouts": len(group), "prompt": prompt, "rollouts": shown})
    return found


def split_channels(text: str) -> list[dict[str, Any]]:
    """``<|think|>7+5=2<|answer|>2<|end|>`` as channels with a name and a text; text before any token has no name.

    Equal channels in a row are one, with ``times``: a model without a clue repeats one token up to its budget.
    """
    first, *rest = CHANNEL.split(text)
    channels = [("", first)] if first else []
    channels += zip(rest[::2], rest[1::2], strict=True)
    return [{"name": name, "text": body, "times": len(list(same))} for (name, body), same in groupby(channels)]


def _shown(row: Mapping[str, Any]) -> Found:
    return {
        "channels": split_channels(row["completion"]),
        "outcome": row["outcome"],
        "reward": row["reward"],
        "num_tokens": row["num_tokens"],
        "reason": row.get("reason", ""),
    }
