"""What the run is held to (checks) and what went wrong on the way (alarms): statements, with the names of the cells."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from flows.report.inputs import Inputs, Row, Stage

Figures = Mapping[str, Any]
MIN_GAIN, MIN_MEAN_RECOVERY, MIN_RECOVERY = 0.10, 0.92, 0.80
WINDOW = 5
MAX_TRUNCATED, MAX_SAMPLER_KL, MIN_KEPT, MAX_SPIKE = 0.5, 1e-3, 0.05, 10.0
COLLAPSE, SOLVED = 0.1, 0.9
MAX_NAMES = 3
SPIKE_WINDOW = 10
NO_GAP = ["no cell has a gap"]


def run_checks(inputs: Inputs, cells: Figures, summary: Figures) -> list[dict[str, Any]]:
    """Each ``{"name", "ok", "detail", "missed"}``; ``missed`` says for the verdict what fell short.

    At T = 1, the recoveries also greedy where that was evaluated.
    """
    weak = [c for c in cells if not _clear_gain(cells[c]["sampled"])]
    flat = {model: _not_rising(inputs, cells, model) for model in ("expert", "student")}
    return [
        _check(
            "Every expert beats the base by 10 points or more, intervals apart", not weak, weak, "no clear gain in "
        ),
        *(check for mode in summary for check in _recovery_checks(cells, summary[mode]["recovery"], mode)),
        *(
            _check(f"More effort is more accuracy and more tokens: {model}", not steps, steps, f"{model}: no rise in ")
            for model, steps in flat.items()
        ),
    ]


def _recovery_checks(cells: Figures, mean: Figures | None, mode: str) -> list[dict[str, Any]]:
    greedily, greedy = (", greedily", "greedy ") if mode == "greedy" else ("", "")
    recoveries = {cell: modes[mode]["recovery"] for cell, modes in cells.items() if mode in modes}
    known = {cell: found["value"] for cell, found in recoveries.items() if found}
    low = [f"{cell} {value:.3f}" for cell, value in known.items() if value < MIN_RECOVERY]
    enough = mean is not None and mean["value"] >= MIN_MEAN_RECOVERY
    worth = NO_GAP if mean is None else [f"{mean['value']:.3f}"]
    each = f"No cell recovers less than {MIN_RECOVERY:.2f}{greedily}"
    return [
        _check(f"Mean recovery is {MIN_MEAN_RECOVERY} or more{greedily}", enough, worth, f"{greedy}mean recovery "),
        _check(each, bool(known) and not low, low if known else NO_GAP, f"{greedy}recovery of "),
    ]


def _check(name: str, ok: bool, items: Sequence[str], what: str) -> dict[str, Any]:
    """``what`` and the first items make the verdict's words for a failed check."""
    rest = f" and {len(items) - MAX_NAMES} more" if len(items) > MAX_NAMES else ""
    missed = "" if ok else f"{what}{_names(items[:MAX_NAMES])}{rest}"
    return {"name": name, "ok": ok, "detail": _names(items), "missed": missed}


def cell_flags(modes: Figures) -> list[str]:
    """What to know about one cell before trusting its recovery."""
    scores = modes["sampled"]
    if scores["recovery"] is None:
        return ["no gap"]
    flags = [] if _clear_gain(scores) else ["small gain"]
    if scores["recovery"]["value"] < MIN_RECOVERY:
        flags.append("low recovery")
    if "greedy" in modes and modes["greedy"]["recovery"] is None:
        flags.append("no greedy gap")
    return flags


def find_alarms(inputs: Inputs) -> list[dict[str, str]]:
    """Each ``{"stage", "alarm", "detail"}``; looked for in the first and last few steps of every training stage."""
    stages = [(stage, EXPERT_ALARMS) for stage in inputs.training.values()]
    stages += [(inputs.distill, DISTILL_ALARMS)] if inputs.distill else []
    stages += [(inputs.midtrain, ())] if inputs.midtrain else []
    alarms = []
    for stage, own in stages:
        for look in (*own, *COMMON_ALARMS):
            if stage.metrics and (found := look(stage)):
                alarms.append({"stage": stage.name, "alarm": found[0], "detail": found[1]})
    return alarms


Look = Callable[[Stage], tuple[str, str] | None]


def _truncation(stage: Stage) -> tuple[str, str] | None:
    last = _last(stage, "truncated")
    found = last is not None and last > MAX_TRUNCATED
    return ("truncation", f"{last:.0%} of the last rollouts were cut off at their budget") if found else None


def _entropy(stage: Stage) -> tuple[str, str] | None:
    first, last, accuracy = _first(stage, "entropy"), _last(stage, "entropy"), _last(stage, "accuracy")
    if first is None or last is None or last >= COLLAPSE * first or (accuracy or 0.0) >= SOLVED:
        return None
    return "entropy collapse", f"from {first:.3f} to {last:.3f} nats at an accuracy of {accuracy or 0.0:.0%}"


def _sampler_kl(stage: Stage) -> tuple[str, str] | None:
    most = max((abs(row["sampler_kl"]) for row in stage.metrics if "sampler_kl" in row), default=0.0)
    return ("sampler and trainer differ", f"KL up to {most:.1e} nats a token") if most > MAX_SAMPLER_KL else None


def _gradient(stage: Stage) -> tuple[str, str] | None:
    """A norm far above those of the steps before it; a step without any gradient is no measure."""
    norms = [(row["step"], row["grad_norm"]) for row in stage.metrics if row.get("grad_norm", 0.0) > 0]
    before = [median(norm for _, norm in norms[i - SPIKE_WINDOW : i]) for i in range(SPIKE_WINDOW, len(norms))]
    spikes = [(n / m, step, n) for (step, n), m in zip(norms[SPIKE_WINDOW:], before, strict=True) if n > MAX_SPIKE * m]
    if not spikes:
        return None
    times, step, norm = max(spikes)
    return "gradient spike", f"{norm:.2g} at step {step}, {times:.0f} times the median before it"


def _reward(stage: Stage) -> tuple[str, str] | None:
    first, last = _first(stage, "reward"), _last(stage, "reward")
    fell = first is not None and last is not None and last < first
    return ("reward fell", f"from {first:.2f} to {last:.2f}") if fell else None


def _groups(stage: Stage) -> tuple[str, str] | None:
    last = _last(stage, "kept_groups")
    return (
        ("no signal", f"{last:.0%} of the last groups had variance") if last is not None and last < MIN_KEPT else None
    )


def _infra(stage: Stage) -> tuple[str, str] | None:
    most = max((row["infra"] for row in stage.metrics if "infra" in row), default=0.0)
    return ("infra verdicts", f"up to {most:.1%} of a step's rollouts could not be graded") if most > 0 else None


def _teacher_kl(stage: Stage) -> tuple[str, str] | None:
    names = [name for name in stage.metrics[-1] if name.startswith("teacher_kl/")]
    ends = {name: (_first(stage, name), _last(stage, name)) for name in names}
    away = [n.removeprefix("teacher_kl/") for n, (first, last) in ends.items() if (last or 0.0) > (first or 0.0)]
    return ("away from a teacher", f"the KL to the teacher rose: {_names(away)}") if away else None


EXPERT_ALARMS: tuple[Look, ...] = (_truncation, _entropy, _reward, _groups, _infra)
DISTILL_ALARMS: tuple[Look, ...] = (_truncation, _teacher_kl)
COMMON_ALARMS: tuple[Look, ...] = (_sampler_kl, _gradient)


def _clear_gain(scores: Figures) -> bool:
    base, expert = scores["base"], scores["expert"]
    gained: bool = expert["accuracy"] - base["accuracy"] >= MIN_GAIN and expert["low"] > base["high"]
    return gained


def _not_rising(inputs: Inputs, cells: Figures, model: str) -> list[str]:
    """Steps from an effort to the next that bring no more accuracy, or take no more tokens."""
    flat = []
    for domain in inputs.domains:
        for less, more in pairwise(inputs.cells_of(domain)):
            smaller, larger = (cells[cell]["sampled"][model] for cell in (less, more))
            for what in ("accuracy", "tokens"):
                if larger[what] <= smaller[what]:
                    flat.append(f"{domain} {less.split('/')[1]}→{more.split('/')[1]} ({what})")
    return flat


def _first(stage: Stage, name: str) -> float | None:
    return _mean(stage.metrics[:WINDOW], name)


def _last(stage: Stage, name: str) -> float | None:
    return _mean(stage.metrics[-WINDOW:], name)


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None


def _names(items: Sequence[str]) -> str:
    return ", ".join(items)
