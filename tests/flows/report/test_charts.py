"""Charts and the timeline: the geometry is that of the numbers, and labels are escaped."""

import re

import pytest

from flows.report.charts import Series, line_chart, thin, ticks
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
