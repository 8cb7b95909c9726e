"""What a run came to: the matrix base, expert, student per cell, and where everything lies."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.specs import StageResult
from flows.workspace import Workspace

NO_GAP = 0.05  # the report asks for this much too, and for an interval above 0


def matrix_rows(results: Mapping[str, StageResult]) -> list[dict[str, Any]]:
    """A row a cell: accuracy at T = 1 and greedy, and mean tokens, of base, own expert and student; recovery at T = 1.

    Recovery is None where the expert is not above the base by ``NO_GAP``. Empty when the evaluations are not there.
    """
    base, student = _cells(results.get("evaluate/base")), _cells(results.get("evaluate/student"))
    rows = []
    for cell in results["evaluate/base"].config["cells"] if base else ():
        scores = {"base": base.get(cell), "expert": _cells(results.get(f"evaluate/{cell}")).get(cell)}
        scores["student"] = student.get(cell)
        if all(scores.values()):
            rows.append(_row(cell, {name: score for name, score in scores.items() if score is not None}))
    return rows


def matrix_text(rows: list[dict[str, Any]]) -> str:
    """The matrix for a terminal: accuracy at T = 1 (greedy) / tokens."""
    if not rows:
        return ""
    width = max(len(row["cell"]) for row in rows)
    head = "".join(f"{name:>21}" for name in ("base", "expert", "student"))
    lines = ["accuracy at T = 1 (greedy) / tokens", f"{'':<{width}}{head}{'recovery':>10}"]
    for row in rows:
        figures = "".join(f"{_figure(row[name]):>21}" for name in ("base", "expert", "student"))
        recovery = "no gap" if row["recovery"] is None else f"{row['recovery']:.2f}"
        lines.append(f"{row['cell']:<{width}}{figures}{recovery:>10}")
    return "\n".join(lines)


def places(workspace: Workspace, results: Mapping[str, StageResult]) -> dict[str, str]:
    """Where the report and the student are, and the commands that open the two user interfaces."""
    found: dict[str, str] = {}
    if "report" in results:
        found["report"] = str(_first(results["report"].output_path, "*.html"))
    if "export" in results:
        found["student"] = str(results["export"].output_path)
    return found | ui_commands(workspace)


def ui_commands(workspace: Workspace) -> dict[str, str]:
    """Shell commands, run beside the workspace or from anywhere."""
    home = f"PREFECT_HOME={_quoted(workspace.prefect_path)} PREFECT_SERVER_ANALYTICS_ENABLED=false"
    return {
        "mlflow": f"mlflow ui --backend-store-uri {_quoted(workspace.mlflow_uri)}",
        "prefect": f"{home} prefect server start",
    }


def _row(cell: str, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": cell}
    for name, modes in scores.items():
        sampled, greedy = modes["sampled"], modes.get("greedy", {})
        row[name] = {"sampled": sampled["accuracy"], "greedy": greedy.get("accuracy"), "tokens": sampled["tokens"]}
    gap = row["expert"]["sampled"] - row["base"]["sampled"]
    row["recovery"] = (row["student"]["sampled"] - row["base"]["sampled"]) / gap if gap > NO_GAP else None
    return row


def _cells(result: StageResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    path = result.output_path / "cells.json"
    cells: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return cells


def _figure(scores: Mapping[str, Any]) -> str:
    greedy = f" ({scores['greedy']:.2f})" if scores["greedy"] is not None else ""
    return f"{scores['sampled']:.2f}{greedy} /{scores['tokens']:5.1f}"


def _first(folder: Path, pattern: str) -> Path:
    return next(iter(sorted(folder.glob(pattern))), folder)


def _quoted(text: object) -> str:
    return f"'{text}'" if " " in str(text) else str(text)
