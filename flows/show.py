"""How plans and results look: lines for people, rows for --json."""

import json
from collections.abc import Mapping
from typing import Any

import click

from flows.plan import StagePlan
from flows.progress import figures, format_s
from flows.specs import StageResult

Plans = Mapping[str, StagePlan]
_COLOURS = {"run": "yellow", "waits": "cyan", "cached": "green"}


def plan_rows(plans: Plans) -> list[dict[str, Any]]:
    """A row a stage: status, reason, changed keys, estimate and, where there is one, the result."""
    return [
        {
            "stage": name,
            "status": p.status,
            "reason": p.reason,
            "changes": [{"key": c.key, "old": c.old, "new": c.new} for c in p.changes],
            "estimate_s": p.estimate_s,
            **_result_row(p.result),
        }
        for name, p in plans.items()
    ]


def plan_text(plans: Plans, num_slots: int) -> str:
    """A line a stage with its reason, every changed key, and how long it may take."""
    width = max(len(name) for name in plans)
    lines = []
    for name, p in plans.items():
        lines.append(f"{_status(p)}{name:<{width}}  {p.reason}".rstrip())
        if p.status != "cached":
            lines += [f"{'':<7}{'':<{width}}    {change}" for change in p.changes[1:]]
    todo = [p for p in plans.values() if p.status != "cached"]
    line = f"{len(todo)} to run or waiting, {len(plans) - len(todo)} cached"
    known = [p.estimate_s for p in todo if p.estimate_s is not None]
    if todo and len(known) == len(todo):
        line += f"; about {format_s(sum(known) / num_slots)} by the last run's times"
    return "\n".join([*lines, line])


def status_text(plans: Plans) -> str:
    """A line a stage: its duration and first metrics, or why it has no result."""
    width = max(len(name) for name in plans)
    lines = []
    for name, p in plans.items():
        made = f"{format_s(p.result.duration_s):>6}  {figures(p.result)}" if p.result is not None else p.reason
        lines.append(f"{_status(p)}{name:<{width}}  {made}".rstrip())
    return "\n".join(lines)


def _status(p: StagePlan) -> str:
    return click.style(f"{p.status:<7}", fg=_COLOURS[p.status])


def _result_row(result: StageResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {
        "result_id": result.result_id,
        "folder": str(result.folder),
        "duration_s": result.duration_s,
        "metrics": dict(result.metrics),
    }


def places_text(where: Mapping[str, str]) -> str:
    """Names and places, one a line."""
    return "\n".join(f"{name:<8} {place}" for name, place in where.items())


def to_json(value: Any) -> str:
    """As --json prints it."""
    return json.dumps(value, indent=1)
