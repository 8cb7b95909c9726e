"""The quick start on several seeds of the whole pipeline, as one Markdown table.

    for seed in 0 1 2; do nonet run recipes/quickstart.toml -w workspaces/$seed --set seed=$seed; done
    python -m bench.quickstart workspaces/0 workspaces/1 workspaces/2 > bench/quickstart.md

Reads each workspace's newest report; nothing is measured again.
"""

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """# The quick start on {count} seeds of the whole pipeline

Accuracy in % at T = 1 (greedy in brackets) on held-out tasks, the effort's token budget enforced; recovery =
(student − base) / (expert − base). Written by `python -m bench.quickstart`; each row's intervals are in its report.

| cell | seed | base | expert | student | recovery | tokens: base → expert → student |
|---|--:|--:|--:|--:|--:|--:|
"""


def load_report(workspace: Path) -> dict[str, Any]:
    """The newest ``report.json`` of a workspace. Raises ValueError when it has none."""
    reports = sorted(workspace.glob("store/report/*/*/output/report.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        raise ValueError(f"{workspace} has no report; run nonet run recipes/quickstart.toml -w {workspace}")
    report: dict[str, Any] = json.loads(reports[-1].read_text())
    return report


def cell_row(cell: str, seed: int, modes: dict[str, Any]) -> str:
    """One line: a cell on one seed."""
    sampled, greedy = modes["sampled"], modes["greedy"]
    accuracy = [
        f"{100 * sampled[model]['accuracy']:.1f} ({100 * greedy[model]['accuracy']:.1f})"
        for model in ("base", "expert", "student")
    ]
    recovery = f"{_value(sampled['recovery'])} ({_value(greedy['recovery'])})"
    tokens = " → ".join(f"{sampled[model]['tokens']:.1f}" for model in ("base", "expert", "student"))
    return "| " + " | ".join([cell, str(seed), *accuracy, recovery, tokens]) + " |"


def table(reports: list[dict[str, Any]]) -> str:
    """All cells on all seeds, then each seed's summary and the checks that failed."""
    lines = [
        cell_row(cell, report["made"]["seed"], report["cells"][cell])
        for cell in reports[0]["cells"]
        for report in reports
    ]
    summary = [
        "",
        "| seed | mean recovery | worst cell | greedy: mean | worst cell | checks failed |",
        "|--:|--:|--:|--:|--:|---|",
    ]
    for report in reports:
        modes = [report["summary"][mode] for mode in ("sampled", "greedy")]
        recoveries = [
            text
            for mode in modes
            for text in (_value(mode["recovery"]), f"{mode['worst']['cell']} {mode['worst']['recovery']:.2f}")
        ]
        failed = [check["name"] for check in report["checks"] if not check["ok"]] or ["none"]
        summary.append("| " + " | ".join([str(report["made"]["seed"]), *recoveries, "; ".join(failed)]) + " |")
    return HEAD.format(count=len(reports)) + "\n".join(lines + summary)


def _value(estimate: dict[str, float] | None) -> str:
    return "no gap" if estimate is None else f"{estimate['value']:.2f}"


if __name__ == "__main__":
    print(table([load_report(Path(name)) for name in sys.argv[1:]]))
