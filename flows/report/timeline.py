"""When each stage ran and what it cost: a Gantt chart without the hours in which nothing ran."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from flows.report.inputs import Stage

MAX_IDLE_S = 60.0
MAX_TICKS = 9
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
NAME, ROW, WIDTH, RIGHT = 190, 19, 1080, 64


def timeline_figures(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """One row a stage with a record, in order of start, ``start_s`` and ``end_s`` counted from the first.

    Stretches of more than a minute without any stage are taken out (earlier runs may be days old): ``cut_s`` is what
    was taken out right before the row's stage.
    """
    known = sorted((s.record for s in stages if {"started", "created"} <= s.record.keys()), key=lambda r: r["started"])
    unique = list({(r["stage"], r["started"]): r for r in known}.values())
    rows: list[dict[str, Any]] = []
    shift = busy_until = unique[0]["started"] if unique else 0.0
    for record in unique:
        idle = record["started"] - busy_until
        cut_s = idle if idle > MAX_IDLE_S else 0.0
        shift += cut_s
        busy_until = max(busy_until, record["created"])
        row = {"stage": record["stage"], "start_s": record["started"] - shift, "end_s": record["created"] - shift}
        rows.append(row | {"duration_s": record.get("duration_s", row["end_s"] - row["start_s"]), "cut_s": cut_s})
    return rows


def cost_figures(timeline: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of work by kind of stage (the first part of its name), and in all."""
    costs: dict[str, float] = {}
    for row in timeline:
        kind = row["stage"].split("/")[0]
        costs[kind] = costs.get(kind, 0.0) + row["duration_s"]
    return costs | {"all": sum(costs.values())}


def gantt_chart(timeline: Sequence[Mapping[str, Any]]) -> Markup:
    """The rows of ``timeline_figures`` as bars."""
    if not timeline:
        return Markup("")
    end = max(row["end_s"] for row in timeline) or 1.0
    height = ROW * len(timeline) + 26

    def x(seconds: float) -> float:
        return NAME + seconds / end * (WIDTH - NAME - RIGHT)

    parts = []
    step = next((s for s in TICKS_S if end / s <= MAX_TICKS), end / MAX_TICKS)
    for value in (i * step for i in range(int(end / step) + 1)):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="4" y2="{height - 20}"/>')
        parts.append(
            f'<text class="tick" x="{x(value):.1f}" y="{height - 5}" text-anchor="middle">{clock(value)}</text>'
        )
    for index, row in enumerate(timeline):
        y = 6 + ROW * index
        kind = row["stage"].split("/")[0]
        width = max(2.0, x(row["end_s"]) - x(row["start_s"]))
        name, time = escape(row["stage"]), clock(row["duration_s"])
        parts.append(f'<text class="name" x="{NAME - 8}" y="{y + 12}" text-anchor="end">{name}</text>')
        parts.append(f'<rect class="bar kind-{escape(kind)}" x="{x(row["start_s"]):.1f}" y="{y}" width="{width:.1f}"')
        parts.append(f' height="{ROW - 5}" rx="3"><title>{name}: {time}</title></rect>')
        parts.append(f'<text class="tick" x="{x(row["end_s"]) + 5:.1f}" y="{y + 11}">{time}</text>')
        if row["cut_s"]:
            cut, at = clock(row["cut_s"]), x(row["start_s"])
            parts.append(f'<line class="cut" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - 20}">')
            parts.append(f"<title>{cut} without work left out here</title></line>")
    head = f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="timeline of the stages">'
    return Markup(head + "".join(parts) + "</svg>")


def clock(seconds: float) -> str:
    """``8.3s``, ``2:05``, ``1:02:05``."""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds % 1 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
