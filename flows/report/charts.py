"""Charts as inline SVG: lines over steps, accuracy over tokens, base–expert–student on one axis.

Colours are CSS classes; models also differ by the shape of their mark, efforts by the width of their line and a label
at its end. Every function returns a complete ``<svg>`` element, its labels escaped here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from markupsafe import Markup

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 38, 10, 8, 22
LABEL_ROOM, LABEL_STEP = 30, 12.0


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; ``style`` is the CSS class that colours it."""

    name: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled point of the accuracy–token chart, with the interval of its accuracy."""

    label: str
    tokens: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A plot's area in pixels and the data range that it shows."""

    width: int
    height: int
    x_range: Point
    y_range: Point
    left: int = LEFT
    right: int = RIGHT

    def x(self, value: float) -> float:
        return _scale(value, self.x_range, self.left, self.width - self.right)

    def y(self, value: float) -> float:
        return _scale(value, self.y_range, self.height - BOTTOM, TOP)


def line_chart(
    series: Sequence[Series], label: str, y_range: Point | None = None, *, width: int = 330, height: int = 150
) -> Markup:
    """Lines over steps, each ending in a dot, labelled where there are several; empty without any point.

    ``y_range`` is that of the points unless charts beside each other are to share one (``value_range``).
    """
    drawn = [s for s in series if s.points]
    if not drawn:
        return Markup("")
    xs = [x for s in drawn for x, _ in s.points]
    labelled = len(drawn) > 1
    frame = Frame(
        width,
        height,
        (min(xs), max(xs)),
        y_range or value_range(drawn) or (0.0, 1.0),
        right=LABEL_ROOM if labelled else RIGHT,
    )
    parts = [_axes(frame, whole_x=True)]
    for one in drawn:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in one.points)
        x, y = one.points[-1]
        parts.append(f'<polyline class="line {one.style}" points="{path}"/>')
        title = f"{one.name}: {_text(one.points[0][1])} → {_text(y)}"
        parts.append(_marker(one.style, frame.x(x), frame.y(y), 3, title))
    if labelled:
        ends = {end: [s for s in drawn if s.points[-1][0] == end] for end in sorted({s.points[-1][0] for s in drawn})}
        for end, ending in ends.items():
            places = spread([frame.y(s.points[-1][1]) for s in ending], LABEL_STEP, height - BOTTOM - 3)
            for one, y in zip(ending, places, strict=True):
                at = f'x="{frame.x(end) + 6:.1f}" y="{y + 3.5:.1f}"'
                parts.append(f'<text class="tag {one.style}" {at}>{escape(one.name)}</text>')
    return _svg(width, height, label, parts)


def tradeoff_chart(
    models: Sequence[tuple[str, Sequence[Mark], str]], label: str, *, width: int = 360, height: int = 250
) -> Markup:
    """Accuracy over tokens: a line through its efforts for every (name, marks, labels: "above", "below" or "")."""
    marks = [mark for _, of_model, _ in models for mark in of_model]
    most = max(mark.tokens for mark in marks)
    frame = Frame(width, height, (0.0, most * 1.12 or 1.0), (0.0, 1.0))
    parts = [_axes(frame, percent_y=True)]
    for style, of_model, labels in models:
        path = " ".join(f"{frame.x(m.tokens):.1f},{frame.y(m.accuracy):.1f}" for m in of_model)
        parts.append(f'<polyline class="line faint {style}" points="{path}"/>')
        for mark in of_model:
            x, y = frame.x(mark.tokens), frame.y(mark.accuracy)
            whisker = f'x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y(mark.low):.1f}" y2="{frame.y(mark.high):.1f}"'
            title = f"{style}, {mark.label}: {mark.accuracy:.1%} at {mark.tokens:.1f} tokens"
            parts.append(f'<line class="whisker {style}" {whisker}/>')
            parts.append(_marker(style, x, y, 4.5, title))
            if labels:
                place = (x - 8, y - 5, "end") if labels == "above" else (x + 8, y + 12, "start")
                at = f'x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{place[2]}"'
                parts.append(f'<text class="tag {style}" {at}>{escape(mark.label)}</text>')
    parts.append(f'<text class="tick" x="{width - RIGHT}" y="{height - BOTTOM - 5}" text-anchor="end">tokens</text>')
    return _svg(width, height, label, parts)


def interval_chart(scores: Sequence[tuple[str, float, float, float]], label: str, *, width: int = 164) -> Markup:
    """One row of marks with whiskers on an axis from 0 to 1: (name, value, low, high) each, first to last."""
    height, step = 28, 8
    frame = Frame(width, height, (0.0, 1.0), (0.0, 1.0), left=6, right=6)
    parts = [
        f'<line class="grid" x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" y1="0" y2="{height}"/>'
        for x in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    for index, (style, value, low, high) in enumerate(scores):
        y = 6 + step * index
        parts.append(
            f'<line class="whisker {style}" x1="{frame.x(low):.1f}" x2="{frame.x(high):.1f}" y1="{y}" y2="{y}"/>'
        )
        parts.append(_marker(style, frame.x(value), y, 3.6, f"{style}: {value:.1%} ({low:.1%} to {high:.1%})"))
    return _svg(width, height, label, parts)


def value_range(series: Sequence[Series]) -> Point | None:
    """A little more than the range of the values, down to zero where they come close to it; None without a point."""
    ys = [y for s in series for _, y in s.points]
    if not ys:
        return None
    low, high = min(ys), max(ys)
    air = 0.06 * (high - low) or abs(high) * 0.2 or 1.0
    return (0.0 if 0 <= low < 0.35 * high or low == high >= 0 else low - air, high + air)


def spread(places: Sequence[float], step: float, end: float) -> list[float]:
    """The places, in the order given, moved as little as needed to be ``step`` apart and not beyond ``end``."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, at in pairwise(order):
        moved[at] = max(moved[at], moved[before] + step)
    limit = end
    for at in reversed(order):
        moved[at] = min(moved[at], limit)
        limit = moved[at] - step
    return moved


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((power * m for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point], most: int = 160) -> list[Point]:
    """At most ``most`` points: means over stretches of equal length."""
    size = math.ceil(len(points) / most) or 1
    if size == 1:
        return list(points)
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(s[-1][0], sum(y for _, y in s) / len(s)) for s in stretches]


def _axes(frame: Frame, *, whole_x: bool = False, percent_y: bool = False) -> str:
    parts = []
    for value in ticks(*frame.y_range, count=4):
        y = frame.y(value)
        text = f"{value:.0%}" if percent_y else _text(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="tick" x="{frame.left - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    for value in ticks(*frame.x_range, count=5):
        if whole_x and value != int(value):
            continue
        x = f"{frame.x(value):.1f}"
        parts.append(f'<text class="tick" x="{x}" y="{frame.height - 6}" text-anchor="middle">{_text(value)}</text>')
    return "".join(parts)


def _marker(style: str, x: float, y: float, r: float, title: str) -> str:
    """Base is a square, student a diamond, everything else a circle."""
    name = f'class="dot {style}"'
    if style == "base":
        shape = f'<rect {name} x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:.1f}" height="{2 * r:.1f}">'
        return f"{shape}<title>{escape(title)}</title></rect>"
    if style == "student":
        d = 1.35 * r
        corners = f"{x:.1f},{y - d:.1f} {x + d:.1f},{y:.1f} {x:.1f},{y + d:.1f} {x - d:.1f},{y:.1f}"
        return f'<polygon {name} points="{corners}"><title>{escape(title)}</title></polygon>'
    return f'<circle {name} cx="{x:.1f}" cy="{y:.1f}" r="{r}"><title>{escape(title)}</title></circle>'


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> Markup:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return Markup(f'<svg {size} role="img" aria-label="{escape(label)}">' + "".join(parts) + "</svg>")


def _scale(value: float, of: Point, start: float, end: float) -> float:
    share = (value - of[0]) / (of[1] - of[0]) if of[1] > of[0] else 0.5
    return start + share * (end - start)


def _text(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"
