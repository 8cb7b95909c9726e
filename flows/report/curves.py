"""The curves of every training stage: which metrics are drawn, for whom, under which heading."""

from collections.abc import Sequence
from typing import Any

from flows.report.charts import Series, line_chart, thin, value_range
from flows.report.inputs import Inputs, Stage

EXPERT_METRICS = {
    "reward": "reward",
    "tokens": "sampled tokens a rollout",
    "truncated": "share cut off at the budget",
    "entropy": "entropy, nats a token",
    "sampler_kl": "sampler–trainer KL, nats a token",
    "grad_norm": "gradient norm",
}
DISTILL_METRICS = {
    "accuracy": "accuracy of the student's samples",
    "tokens": "sampled tokens a rollout",
    "truncated": "share cut off at the budget",
    "entropy": "entropy, nats a token",
    "sampler_kl": "sampler–trainer KL, nats a token",
    "grad_norm": "gradient norm",
}
MIDTRAIN_METRICS = {
    "loss": "loss, nats a token",
    "token_accuracy": "token accuracy",
    "grad_norm": "gradient norm",
}
OWN_AXIS = ("sampler_kl", "grad_norm")  # one run's spike would flatten all others
NUM_STYLES = 6  # effort-0 … effort-5, domain-0 … domain-5 in the style sheet
Chart = dict[str, Any]


def expert_curves(inputs: Inputs) -> list[Chart]:
    """One row a metric, one chart a domain, one line an effort; a row shares its axis unless in OWN_AXIS."""
    rows = []
    for metric, title in EXPERT_METRICS.items():
        of_domain = {}
        for domain in inputs.domains:
            cells = [cell for cell in inputs.cells_of(domain) if cell in inputs.training]
            series = [_series(inputs.training[c], metric, c.split("/")[1], _effort_style(inputs, c)) for c in cells]
            of_domain[domain] = series
        whole = value_range([one for series in of_domain.values() for one in series])
        shared = None if metric in OWN_AXIS else whole
        if whole is not None:
            charts = [
                {"domain": domain, "svg": line_chart(series, f"{title}, experts of {domain}", shared)}
                for domain, series in of_domain.items()
            ]
            rows.append({"title": title, "charts": charts})
    return rows


def distill_curves(inputs: Inputs) -> list[Chart]:
    """The KL to every teacher by name (one chart a domain), then the student's own metrics."""
    if inputs.distill is None:
        return []
    of_domain = {
        domain: [
            _series(inputs.distill, f"teacher_kl/{cell}", cell.split("/")[1], _effort_style(inputs, cell))
            for cell in inputs.cells_of(domain)
        ]
        for domain in inputs.domains
    }
    shared = value_range([one for series in of_domain.values() for one in series])
    titles = {domain: f"KL to the teachers of {domain}, nats a token" for domain in inputs.domains}
    charts = [{"title": titles[d], "svg": line_chart(series, titles[d], shared)} for d, series in of_domain.items()]
    return [chart for chart in charts if chart["svg"]] + stage_curves(inputs.distill, DISTILL_METRICS)


def midtrain_curves(inputs: Inputs) -> list[Chart]:
    return [] if inputs.midtrain is None else stage_curves(inputs.midtrain, MIDTRAIN_METRICS)


def stage_curves(stage: Stage, metrics: dict[str, str]) -> list[Chart]:
    """One chart a metric that the stage logged."""
    charts = [
        {"title": title, "svg": line_chart([_series(stage, metric, metric, "plain")], title)}
        for metric, title in metrics.items()
    ]
    return [chart for chart in charts if chart["svg"]]


def curve_figures(stages: Sequence[Stage]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Every metric of every stage as thinned (step, value) points, for the JSON."""
    return {
        stage.name: {
            name: thin(_points(stage, name)) for name in sorted(stage.metrics[-1]) if name not in ("step", "time_s")
        }
        for stage in stages
        if stage.metrics
    }


def _effort_style(inputs: Inputs, cell: str) -> str:
    return f"effort-{inputs.efforts.index(cell.split('/')[1]) % NUM_STYLES}"


def _series(stage: Stage, metric: str, name: str, style: str) -> Series:
    return Series(name, style, thin(_points(stage, metric)))


def _points(stage: Stage, metric: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[metric])) for row in stage.metrics if metric in row]
