"""The report stage: one HTML file that opens anywhere, the matrix as Markdown, and the same figures as JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from data.stage import StageRequest
from flows.report.charts import Mark, interval_chart, tradeoff_chart
from flows.report.checks import cell_flags, find_alarms, run_checks
from flows.report.curves import curve_figures, distill_curves, expert_curves, midtrain_curves
from flows.report.inputs import Inputs, read_inputs
from flows.report.matrix import MODELS, cell_figures, discovery_figures, full_matrix, summary_figures
from flows.report.provenance import made_figures, settings
from flows.report.reading import comparisons, training_groups
from flows.report.timeline import clock, cost_figures, gantt_chart, timeline_figures
from flows.report.verdict import matrix_markdown, verdict

Figures = dict[str, Any]
LABELS = {"base": "below", "expert": "above", "student": ""}


def build(request: StageRequest) -> dict[str, float]:
    """Writes ``report.html``, ``report.json`` and ``matrix.md`` to ``output``; returns the headline figures that exist.

    Raises ValueError when an input is no evaluation, or base, expert and student share no cell or no task.
    """
    inputs = read_inputs(request)
    read = comparisons(inputs)
    figures = make_figures(inputs, read)
    request.output_path.mkdir(parents=True, exist_ok=True)
    _write(request.output_path / "report.json", json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    _write(request.output_path / "matrix.md", matrix_markdown(figures))
    _write(request.output_path / "report.html", render(inputs, figures, read))
    return _headline(figures)


def make_figures(inputs: Inputs, read: Mapping[str, Figures]) -> Figures:
    """Everything that the page shows, as plain values; ``read`` is from ``comparisons``."""
    cells = cell_figures(inputs)
    summary = summary_figures(inputs, cells)
    checks = run_checks(inputs, cells, summary)
    timeline = timeline_figures(inputs.stages)
    trained = [*inputs.training.values(), *(s for s in (inputs.midtrain, inputs.distill) if s is not None)]
    return {
        "verdict": verdict(summary, checks, len(inputs.experts)),
        "summary": summary,
        "cells": {cell: modes | {"flags": cell_flags(modes)} for cell, modes in cells.items()},
        "discovery": discovery_figures(cells),
        "matrix": full_matrix(inputs),
        "outcomes": {cell: {key: of[key] for key in ("mode", "num_tasks", "counts")} for cell, of in read.items()},
        "checks": checks,
        "alarms": find_alarms(inputs),
        "timeline": timeline,
        "cost_s": cost_figures(timeline),
        "made": made_figures(inputs, timeline),
        "curves": curve_figures(trained),
    }


def render(inputs: Inputs, figures: Figures, read: Mapping[str, Figures]) -> str:
    """The page: nothing in it is loaded from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clock": clock, "percent": _percent}
    return environment.get_template("template.html").render(
        figures=figures,
        inputs=inputs,
        models=MODELS,
        intervals={cell: _intervals(cell, modes["sampled"]) for cell, modes in figures["cells"].items()},
        tradeoffs=[{"domain": d, "svg": _tradeoff(inputs, figures["cells"], d)} for d in inputs.domains],
        expert_curves=expert_curves(inputs),
        distill_curves=distill_curves(inputs),
        midtrain_curves=midtrain_curves(inputs),
        comparisons=read,
        training_groups=training_groups(inputs),
        gantt=gantt_chart(figures["timeline"]),
        settings=settings(inputs.stages),
    )


def _intervals(cell: str, scores: Mapping[str, Any]) -> Markup:
    rows = [(m, scores[m]["accuracy"], scores[m]["low"], scores[m]["high"]) for m in MODELS]
    return interval_chart(rows, f"accuracy in {cell} at T = 1")


def _tradeoff(inputs: Inputs, cells: Mapping[str, Any], domain: str) -> Markup:
    models = []
    for model in MODELS:
        scores = {cell.split("/")[1]: cells[cell]["sampled"][model] for cell in inputs.cells_of(domain)}
        marks = [Mark(effort, s["tokens"], s["accuracy"], s["low"], s["high"]) for effort, s in scores.items()]
        models.append((model, marks, LABELS[model]))
    return tradeoff_chart(models, f"accuracy over tokens in {domain}")


def _headline(figures: Figures) -> dict[str, float]:
    failed = sum(not check["ok"] for check in figures["checks"])
    headline = {"alarms": float(len(figures["alarms"])), "failed_checks": float(failed)}
    for mode, summary in figures["summary"].items():
        headline |= {f"accuracy/{mode}/{model}": value for model, value in summary["accuracy"].items()}
        if summary["recovery"] is not None:
            headline[f"recovery/{mode}"] = summary["recovery"]["value"]
    return headline


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
