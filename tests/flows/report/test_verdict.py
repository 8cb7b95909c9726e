"""The verdict says what the figures say, and the Markdown table holds them."""

import json
from typing import Any

import pytest

from data.stage import StageRequest
from flows.report.verdict import verdict

RECOVERED = {"value": 0.953, "low": 0.91, "high": 1.004}
HOLDS = {"ok": True, "missed": ""}


def summary(tokens: float = 10.2, recovery: dict[str, float] | None = RECOVERED) -> dict[str, Any]:
    sampled = {
        "accuracy": {"base": 0.31, "expert": 0.32, "student": 0.3},
        "tokens": {"base": 7.0, "expert": 10.0, "student": tokens},
        "recovery": recovery,
        "worst": {"cell": "b/low", "recovery": 0.871} if recovery else None,
    }
    return {"sampled": sampled}


def test_a_run_that_holds() -> None:
    assert verdict(summary(), [HOLDS, HOLDS], 9) == (
        "The student recovers 95% (95% interval 91% to 100%) of what 9 experts gained over their base at T = 1, with "
        "as many tokens as they; every check holds, and its weakest cell, b/low, recovers 87%."
    )


def test_a_run_that_falls_short_says_where() -> None:
    missed = {"ok": False, "missed": "recovery of a/low 0.612"}
    text = verdict(summary(tokens=12.5), [HOLDS, missed, missed], 4)
    assert "with 25% more tokens than they, but 2 of 3 checks fail: recovery of a/low 0.612; recovery" in text
    fewer = verdict(summary(tokens=8.0) | {"greedy": {"recovery": {"value": 0.61}}}, [HOLDS, missed], 4)
    assert "at T = 1, and 61% greedily, with 20% fewer tokens than they, but 1 of 2 checks fails" in fewer


def test_a_run_without_a_gain_has_nothing_to_recover() -> None:
    text = verdict(summary(recovery=None), [], 4)
    assert text.startswith("No cell shows a gain of its expert over the base (31.0% to 32.0% on average)")


def test_the_matrix_as_markdown(run: StageRequest, built: tuple[dict[str, Any], str, dict[str, float]]) -> None:
    figures, page, _ = built
    lines = (run.output_path / "matrix.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert lines[0] == figures["verdict"]
    assert figures["verdict"] in page
    assert len(rows) == 2 + 9 + 1
    assert len({len(row) for row in rows}) == 1
    stored = json.loads((run.input("base") / "cells.json").read_text())["coding/low"]
    sampled, greedy = (f"{100 * stored[mode]['accuracy']:.1f}" for mode in ("sampled", "greedy"))
    assert rows[2][:3] == ["coding", "low", f"{sampled} ({greedy})"]
    assert rows[8][:2] == ["general", "low"]
    assert rows[8][5].startswith("no gap")
    assert rows[-1][0] == "**mean**"
    assert float(rows[-1][5].split()[0]) == pytest.approx(figures["summary"]["sampled"]["recovery"]["value"], abs=0.005)
    assert "60 held-out tasks a cell, 2 samples each" in lines[-1]
    assert "Recipe `quickstart`, seed 3" in lines[-1]
