"""The run in one sentence, and the matrix as a Markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
SAME_TOKENS = 0.03


def verdict(summary: Figures, checks: Sequence[Figures], num_experts: int) -> str:
    """What the student recovers of the experts' gain, at which cost in tokens, and every check that the run misses."""
    sampled = summary["sampled"]
    found, accuracy, missed = sampled["recovery"], sampled["accuracy"], [c for c in checks if not c["ok"]]
    if found is None:
        return (
            f"No cell shows a gain of its expert over the base ({accuracy['base']:.1%} to {accuracy['expert']:.1%} on "
            "average), so there is nothing that a student could recover."
        )
    head = (
        f"The student recovers {found['value']:.0%} (95% interval {found['low']:.0%} to {found['high']:.0%}) of what "
        f"{num_experts} experts gained over their base{_greedily(summary)}, {_tokens(sampled['tokens'])}"
    )
    worst = sampled["worst"]
    if not missed:
        return f"{head}; every check holds, and its weakest cell, {worst['cell']}, recovers {worst['recovery']:.0%}."
    points = "; ".join(check["missed"] for check in missed)
    return f"{head}, but {len(missed)} of {len(checks)} checks {'fails' if len(missed) == 1 else 'fail'}: {points}."


def matrix_markdown(figures: Figures) -> str:
    """The verdict and the matrix, for a README: accuracy in % at T = 1 (greedy in brackets), recovery, tokens."""
    cells = figures["cells"]
    some = next(iter(cells.values()))["sampled"]["student"]
    made = figures["made"]
    lines = [
        figures["verdict"],
        "",
        "| domain | effort | base | expert | student | recovery | tokens: base → expert → student |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for cell, modes in cells.items():
        domain, effort = cell.split("/")
        lines.append(_line([domain, effort], modes["sampled"], modes.get("greedy"), _scores))
    summary = figures["summary"]
    lines.append(_line(["**mean**", ""], summary["sampled"], summary.get("greedy"), _means))
    origin = [f"Recipe `{made['recipe']}`"] if made["recipe"] else []
    origin += [f"seed {made['seed']}"] if made["seed"] is not None else []
    origin += [f"{made['work_s'] / 60:.1f} minutes of work in {made['wall_s'] / 60:.1f}"] if made["work_s"] else []
    origin += [made["machine"]["text"]]
    lines += [
        "",
        f"Accuracy in % on {some['num_tasks']} held-out tasks a cell, {some['samples_per_task']} samples each at T = 1 "
        "(greedy in brackets). Recovery is (student − base) / (expert − base) with its paired 95% interval (greedy in "
        f"brackets). {', '.join(origin)}.",
    ]
    return "\n".join(lines) + "\n"


def _greedily(summary: Figures) -> str:
    found = summary.get("greedy", {}).get("recovery")
    return f" at T = 1, and {found['value']:.0%} greedily" if found else " at T = 1"


def _tokens(tokens: Figures) -> str:
    more = tokens["student"] / tokens["expert"] - 1.0 if tokens["expert"] else 0.0
    if abs(more) <= SAME_TOKENS:
        return "with as many tokens as they"
    return f"with {abs(more):.0%} {'more' if more > 0 else 'fewer'} tokens than they"


def _line(names: list[str], sampled: Figures, greedy: Figures | None, read: Any) -> str:
    accuracy, tokens = read(sampled)
    beside = read(greedy)[0] if greedy else {}
    cells = [
        f"{100 * accuracy[m]:.1f}" + (f" ({100 * beside[m]:.1f})" if beside else "")
        for m in ("base", "expert", "student")
    ]
    recovered = _recovery(sampled["recovery"])
    if greedy:
        recovered += f" ({greedy['recovery']['value']:.2f})" if greedy["recovery"] else " (no gap)"
    spent = " → ".join(f"{tokens[m]:.1f}" for m in ("base", "expert", "student"))
    return "| " + " | ".join([*names, *cells, recovered, spent]) + " |"


def _scores(modes: Figures) -> tuple[Figures, Figures]:
    models = ("base", "expert", "student")
    return {m: modes[m]["accuracy"] for m in models}, {m: modes[m]["tokens"] for m in models}


def _means(summary: Figures) -> tuple[Figures, Figures]:
    return summary["accuracy"], summary["tokens"]


def _recovery(found: Figures | None) -> str:
    return "no gap" if found is None else f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
