"""Charts and the timeline: the geometry is that of the numbers, and labels are escaped."""

import re
from pathlib import Path

import pytest

import flows.report
from flows.report.charts import (
    Mark,
    Series,
    interval_chart,
    line_chart,
    spread,
    thin,
    ticks,
    tradeoff_chart,
    value_range,
)
from flows.report.inputs import Stage
from flows.report.timeline import clock, cost_figures, gantt_chart, timeline_figures


def test_the_timeline_leaves_out_the_hours_in_which_nothing_ran() -> None:
    def stage(name: str, started: float, created: float) -> Stage:
        return Stage(name, {"stage": name, "started": started, "created": created, "duration_s": created - started}, [])

    stages = [stage("b", 9_000.0, 9_010.0), stage("a", 0.0, 100.0), stage("c", 9_005.0, 9_030.0), Stage("none", {}, [])]
    rows = timeline_figures([*stages, stages[0]])
    assert [(r["stage"], r["start_s"], r["end_s"], r["cut_s"]) for r in rows] == [
        ("a", 0.0, 100.0, 0.0),
        ("b", 100.0, 110.0, 8_900.0),
        ("c", 105.0, 130.0, 0.0),
    ]
    assert cost_figures(rows) == {"a": 100.0, "b": 10.0, "c": 25.0, "all": 135.0}
    assert gantt_chart(rows).count("<rect") == 3
    assert gantt_chart([]) == ""


def test_round_numbers_on_axes() -> None:
    assert ticks(0.0, 1.0, count=4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(3.0, 17.0, count=3) == [5.0, 10.0, 15.0]
    assert ticks(2.0, 2.0, count=4) == [2.0]
    assert [clock(s) for s in (8.26, 31, 125, 3725)] == ["8.3s", "31s", "2:05", "1:02:05"]


def test_thinned_curves_keep_their_mean_and_their_end() -> None:
    points = [(float(i), float(i % 7)) for i in range(1, 1001)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert thinned[-1][0] == 1000.0
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thin(points[:50], 100) == points[:50]


def test_a_line_goes_through_its_points_in_proportion() -> None:
    chart = line_chart([Series("<x>", "plain", [(0, 0.0), (5, 1.0), (10, 2.0)]), Series("none", "plain", [])], "a & b")
    (path,) = re.findall(r'<polyline[^>]* points="([^"]+)"', chart)
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in path.split())
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.11)
    assert x0 < x1
    assert y0 > y1
    assert "&lt;x&gt;: 0 → 2" in chart
    assert 'aria-label="a &amp; b"' in chart
    assert line_chart([], "nothing") == ""


def test_charts_beside_each_other_share_a_range_and_name_their_lines() -> None:
    low, high = Series("low", "effort-0", [(0, 0.0), (1, 1.0)]), Series("max", "effort-1", [(0, 0.0), (1, 4.0)])
    shared = value_range([low, high])
    assert shared is not None
    assert shared == pytest.approx((0.0, 4.24))
    assert value_range([Series("none", "plain", [])]) is None
    alone, beside = line_chart([low], "x"), line_chart([low], "x", shared)
    ends = [float(re.findall(r'cy="([\d.]+)"', chart)[0]) for chart in (alone, beside)]
    assert ends[0] < ends[1]
    assert re.findall(r'class="tag [^"]*"[^>]*>(\w+)<', line_chart([low, high], "x")) == ["low", "max"]
    assert "tag" not in alone
    longer = Series("max", "effort-1", [(0, 0.0), (2, 1.0)])
    heights = [float(y) for y in re.findall(r'class="tag [^>]* y="([\d.]+)"', line_chart([low, longer], "x"))]
    assert heights[0] == heights[1]  # they end at different steps, so neither gives way


def test_labels_move_apart_and_stay_inside() -> None:
    assert spread([50.0, 52.0, 10.0], step=10.0, end=100.0) == [50.0, 60.0, 10.0]
    assert spread([98.0, 97.0], step=10.0, end=100.0) == [100.0, 90.0]


def test_models_differ_by_shape_and_not_by_colour_alone() -> None:
    marks = [Mark("low", 5.0, 0.4, 0.3, 0.5), Mark("max", 10.0, 0.8, 0.7, 0.9)]
    chart = tradeoff_chart([("base", marks, "below"), ("expert", marks, "above"), ("student", marks, "")], "x")
    shapes = {style: set(re.findall(rf'<(\w+) class="dot {style}"', chart)) for style in ("base", "expert", "student")}
    assert shapes == {"base": {"rect"}, "expert": {"circle"}, "student": {"polygon"}}
    assert chart.count('class="tag base"') == chart.count('class="tag expert"') == 2
    assert "expert, max: 80.0% at 10.0 tokens" in chart
    assert "base: 40.0% (30.0% to 50.0%)" in interval_chart([("base", 0.4, 0.3, 0.5)], "x")


def test_text_can_be_read_in_both_modes() -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 between every colour that text has and every ground that it stands on."""
    style = (Path(flows.report.__file__).parent / "style.css").read_text()
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    )
    assert light.keys() == dark.keys()
    texts = light.keys() - {"paper", "card", "wash", "rule", "strong", "grid", "heat"}
    assert {"ink", "soft", "faint", "base", "expert", "student", "good", "bad", "warn", "e0", "e5"} <= texts
    for colours in (light, dark):
        for ground in ("paper", "card", "wash"):
            weak = {name for name in texts if contrast(colours[name], colours[ground]) < 4.5}
            assert weak == set(), ground


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
