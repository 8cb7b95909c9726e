"""Rollouts to read: one held-out task answered by base, expert and student, and what an expert tried in training."""

import re
from collections.abc import Mapping, Sequence
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


def comparisons(inputs: Inputs) -> dict[str, list[Found]]:
    """For every cell at most one task of each kind; greedy where all three were evaluated greedily, else at T = 1."""
    return {cell: _comparisons(inputs, cell) for cell in inputs.cells}


def _comparisons(inputs: Inputs, cell: str) -> list[Found]:
    models = (inputs.base, inputs.experts[cell], inputs.student)
    mode = "greedy" if all("greedy" in model.cells[cell] for model in models) else "sampled"
    answers = [model.first_rollouts(cell, mode) for model in models]
    shared = sorted(set.intersection(*(set(found) for found in answers)))
    shared.sort(key=lambda task: -len(answers[1][task]["completion"]))  # the longest says most
    found = []
    for kind, title, wanted in KINDS:
        for task in shared:
            rows = [of_model[task] for of_model in answers]
            if all(want is None or row["outcome"] == want for want, row in zip(wanted, rows, strict=True)):
                shown = [_shown(row) | {"model": model} for model, row in zip(MODELS, rows, strict=True)]
                found.append({"kind": kind, "title": title, "mode": mode, "task": task, "answers": shown})
                found[-1]["prompt"] = split_channels(rows[0]["prompt"])
                break
    return found


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


def split_channels(text: str) -> list[dict[str, str]]:
    """``<|think|>7+5=2<|answer|>2<|end|>`` as channels with a name and a text; text before any token has no name."""
    first, *rest = CHANNEL.split(text)
    channels = [{"name": "", "text": first}] if first else []
    return channels + [{"name": name, "text": body} for name, body in zip(rest[::2], rest[1::2], strict=True)]


def _shown(row: Mapping[str, Any]) -> Found:
    return {
        "channels": split_channels(row["completion"]),
        "outcome": row["outcome"],
        "reward": row["reward"],
        "num_tokens": row["num_tokens"],
        "reason": row.get("reason", ""),
    }
