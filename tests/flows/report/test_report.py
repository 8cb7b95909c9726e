"""The report's figures are those of its inputs, its page needs nothing else, and it says what went wrong."""

import json
import platform
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from data.arrow import load_rows
from data.stage import StageRequest
from flows.graph import build_graph
from flows.recipe import load_recipe
from flows.report.checks import find_alarms
from flows.report.inputs import Inputs, Stage, read_inputs
from flows.report.matrix import discovery_figures
from flows.report.page import build
from flows.report.provenance import settings
from flows.report.reading import comparisons, split_channels, training_groups

Built = tuple[dict[str, Any], str, dict[str, float]]


class Outline(HTMLParser):
    """Notes every attribute that could load something, and whether every element is closed."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link", "circle", "rect", "line", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="session")
def inputs(run: StageRequest) -> Inputs:
    return read_inputs(run)


def only(run: StageRequest, folder: Path, *prefixes: str) -> StageRequest:
    """The same run with fewer inputs."""
    return replace(run, folder=folder, inputs={r: p for r, p in run.inputs.items() if r.startswith(prefixes)})


def test_scores_are_those_of_the_evaluations(run: StageRequest, built: Built) -> None:
    figures = built[0]
    for model, role in {"base": "base", "expert": "expert/coding/max", "student": "student"}.items():
        stored = json.loads((run.input(role) / "cells.json").read_text())
        assert figures["cells"]["coding/max"]["sampled"][model] == stored["coding/max"]["sampled"]
        assert figures["cells"]["coding/max"]["greedy"][model] == stored["coding/max"]["greedy"]


def test_recovery_by_hand(run: StageRequest, built: Built) -> None:
    def accuracy(role: str) -> float:
        rows = [
            r for r in load_rows(run.input(role) / "rollouts") if (r["domain"], r["effort"]) == ("research", "high")
        ]
        passed = [r["outcome"] == "pass" for r in rows if r["mode"] == "greedy"]
        return float(sum(passed) / len(passed))

    base, expert, student = (accuracy(role) for role in ("base", "expert/research/high", "student"))
    found = built[0]["cells"]["research/high"]["greedy"]["recovery"]
    assert found["value"] == pytest.approx((student - base) / (expert - base))
    assert found["low"] < found["value"] < found["high"]


def test_a_cell_without_gap_is_named_and_left_out_of_the_mean(built: Built) -> None:
    figures, _, metrics = built
    cells = figures["cells"]
    assert cells["general/low"]["sampled"]["recovery"] is None
    assert cells["general/low"]["flags"] == ["no gap"]
    values = [modes["sampled"]["recovery"]["value"] for cell, modes in cells.items() if cell != "general/low"]
    assert figures["summary"]["sampled"]["num_cells_with_gap"] == len(values) == 8
    assert metrics["recovery/sampled"] == pytest.approx(sum(values) / 8)
    worst = figures["summary"]["sampled"]["worst"]
    assert worst == {"cell": worst["cell"], "recovery": min(values)}


def test_checks_name_the_cells_that_fail_them(built: Built) -> None:
    checks = {check["name"]: check for check in built[0]["checks"]}
    assert len(checks) == 7
    gain = checks["Every expert beats the base by 10 points or more, intervals apart"]
    assert (gain["ok"], gain["detail"]) == (False, "general/low")
    assert checks["More effort is more accuracy and more tokens: expert"]["ok"]
    assert checks["Mean recovery is 0.92 or more"]["ok"]
    greedy = checks["Mean recovery is 0.92 or more, greedily"]
    assert (greedy["ok"], greedy["detail"]) == (False, f"{built[2]['recovery/greedy']:.3f}")
    assert greedy["missed"] in built[0]["verdict"]
    assert built[2]["failed_checks"] == sum(not check["ok"] for check in checks.values())


def test_effort_that_buys_nothing_is_reported(run: StageRequest, tmp_path: Path) -> None:
    changed = tmp_path / "student"
    cells = json.loads((run.input("student") / "cells.json").read_text())
    cells["coding/max"]["sampled"]["tokens"] = cells["coding/high"]["sampled"]["tokens"]
    changed.mkdir()
    (changed / "cells.json").write_text(json.dumps(cells))
    (changed / "rollouts").symlink_to(run.input("student") / "rollouts")
    build(replace(run, folder=tmp_path / "report", inputs={**run.inputs, "student": changed}))
    figures = json.loads((tmp_path / "report" / "output" / "report.json").read_text())
    assert figures["checks"][-1]["detail"] == "coding high→max (tokens)"
    assert not figures["checks"][-1]["ok"]


def test_the_matrix_has_every_model_in_the_order_of_the_recipe(built: Built) -> None:
    figures = built[0]
    order = [f"{d}/{e}" for d in ("coding", "research", "general") for e in ("low", "high", "max")]
    assert list(figures["cells"]) == order
    assert [row["model"] for row in figures["matrix"]] == ["base", *order, "student"]
    assert all(len(row["scores"]) == 9 and None not in row["scores"] for row in figures["matrix"])


def test_the_page_is_whole_and_loads_nothing(built: Built) -> None:
    page = built[1]
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.targets
    assert all(re.fullmatch(r"#\w+", target) and f'id="{target[1:]}"' in page for target in outline.targets)
    assert not outline.tags & {"script", "link", "iframe", "object", "embed", "img"}
    assert len(page.encode()) < 3_000_000
    assert not re.search(r"url\(|@import|https?://", page)


def test_what_a_model_writes_stays_text(built: Built) -> None:
    assert "7+5*3&lt;script&gt;alert(1)&lt;/script&gt;" in built[1]
    assert "<script" not in built[1]


def test_the_page_shows_every_part(built: Built) -> None:
    page = built[1]
    assert page.count('aria-label="accuracy in ') == 9
    assert page.count('aria-label="accuracy over tokens in ') == 3
    assert page.count(", experts of ") == 6 * 3
    assert page.count('aria-label="KL to the teachers of ') == 3
    assert "timeline of the stages" in page
    assert "wrong on 2 of 3 inputs" in page
    assert "quickstart" in page


def test_the_same_inputs_make_the_same_bytes(run: StageRequest, built: Built, tmp_path: Path) -> None:
    build(replace(run, folder=tmp_path))
    assert (tmp_path / "output" / "report.html").read_text() == built[1]
    assert json.loads((tmp_path / "output" / "report.json").read_text()) == built[0]


def test_the_report_is_made_from_every_stage_but_the_export(recipe: Path) -> None:
    graph = build_graph(load_recipe(recipe, ["seed=7"]))
    assert set(graph["report"].inputs.values()) == set(graph) - {"report", "export"}
    assert graph["report"].config["seed"] == 7


def test_how_it_was_made(built: Built) -> None:
    figures, page, _ = built
    made = figures["made"]
    assert (made["recipe"], made["seed"]) == ("quickstart", 3)
    assert (made["git_commits"], made["code"]) == (["0123456789abcdef"], ["c0de"])
    assert made["machine"]["versions"]["python"] == platform.python_version()
    assert made["budgets"]["coding/low"] == 10
    assert [stage["stage"] for stage in made["stages"]][:2] == ["midtrain", "budget"]
    assert len(made["stages"]) == 3 + 1 + 2 + 9 + 8
    assert made["stages"][1]["result_id"] == "result of budget"
    assert made["work_s"] == pytest.approx(figures["cost_s"]["all"])
    assert f"python {platform.python_version()}" in page
    assert "0123456789abcdef" in page


def test_settings_say_once_what_is_common_and_name_who_differs() -> None:
    def stage(name: str, lr: float, **more: Any) -> Stage:
        config = {"seed": len(name), "optimizer": {"lr": lr, "betas": [0.9, 0.95]}, **more}
        return Stage(name, {"config": config}, [])

    rows = settings([stage("expert/a/low", 1e-3), stage("expert/a/max", 6e-4, group_size=8), stage("distill", 3e-3)])
    assert rows == [
        {
            "kind": "expert",
            "num_stages": 2,
            "common": [("optimizer.betas", "0.9, 0.95")],
            "own": [
                ("optimizer.lr", {"0.001": ["a/low"], "0.0006": ["a/max"]}),
                ("group_size", {"–": ["a/low"], "8": ["a/max"]}),
            ],
        },
        {
            "kind": "distill",
            "num_stages": 1,
            "common": [("optimizer.lr", "0.003"), ("optimizer.betas", "0.9, 0.95")],
            "own": [],
        },
    ]


def test_an_expert_that_beats_the_best_of_k_has_discovered() -> None:
    def cell(expert: float, **pass_at_k: float) -> dict[str, Any]:
        return {"sampled": {"base": {"pass_at_k": pass_at_k}, "expert": {"accuracy": expert}}}

    cells = {"a": cell(0.7, **{"1": 0.3, "4": 0.6}), "b": cell(0.5, **{"1": 0.3, "4": 0.6})}
    assert discovery_figures(cells) == {"k": 4, "cells": ["a"]}


def test_a_report_from_evaluations_alone(run: StageRequest, tmp_path: Path) -> None:
    bare = only(run, tmp_path, "base", "student", "expert/coding", "expert/general")
    metrics = build(bare)
    page = (bare.output_path / "report.html").read_text()
    assert "of what 6 experts gained" in page
    assert "In training" not in page
    assert "KL to the teachers" not in page
    assert metrics["alarms"] == 0.0


def test_inputs_that_do_not_fit_are_refused(run: StageRequest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no cell has all three of base, expert and student"):
        build(only(run, tmp_path, "base", "student"))
    with pytest.raises(ValueError, match="has no input 'student'"):
        build(only(run, tmp_path, "base", "expert"))
    with pytest.raises(ValueError, match=r"cells\.json is missing: the input is not an evaluation"):
        build(replace(run, folder=tmp_path, inputs={**run.inputs, "base": run.input("midtrain")}))


def test_a_healthy_run_raises_no_alarm(inputs: Inputs) -> None:
    assert len(inputs.training) == 9
    assert find_alarms(inputs) == []


@pytest.mark.parametrize(
    ("metrics", "alarm"),
    [
        ({"truncated": (0.1, 0.9)}, "truncation"),
        ({"entropy": (0.6, 0.01), "accuracy": (0.3, 0.4)}, "entropy collapse"),
        ({"reward": (0.5, 0.3)}, "reward fell"),
        ({"sampler_kl": (1e-9, 0.02)}, "sampler and trainer differ"),
        ({"kept_groups": (0.8, 0.01)}, "no signal"),
        ({"infra": (0.0, 0.1)}, "infra verdicts"),
    ],
)
def test_alarms_of_an_expert(inputs: Inputs, metrics: dict[str, tuple[float, float]], alarm: str) -> None:
    rows = [{"step": s, **{name: ends[s > 5] for name, ends in metrics.items()}} for s in range(1, 11)]
    sick = replace(inputs, training={"coding/low": Stage("expert/coding/low", {}, rows)})
    (found,) = find_alarms(sick)
    assert (found["stage"], found["alarm"]) == ("expert/coding/low", alarm)


def test_certainty_about_right_answers_is_no_collapse(inputs: Inputs) -> None:
    rows = [{"step": s, "entropy": 0.6 if s < 6 else 0.01, "accuracy": 0.5 if s < 6 else 0.97} for s in range(1, 11)]
    assert find_alarms(replace(inputs, training={"c": Stage("c", {}, rows)})) == []


def test_alarms_of_the_merge_and_of_the_base(inputs: Inputs) -> None:
    merge = [{"step": s, "teacher_kl/a/low": 0.1 * s, "teacher_kl/a/max": 1.0 / s} for s in range(1, 11)]
    base = [{"step": s, "grad_norm": 50.0 if s == 17 else 2.0 + 90 / s**2} for s in range(1, 31)]  # falls from 92
    found = find_alarms(replace(inputs, distill=Stage("distill", {}, merge), midtrain=Stage("midtrain", {}, base)))
    assert [(a["stage"], a["alarm"], a["detail"]) for a in found] == [
        ("distill", "away from a teacher", "the KL to the teacher rose: a/low"),
        ("midtrain", "gradient spike", "50 at step 17, 19 times the median before it"),
    ]


def test_compared_rollouts_are_of_the_kind_that_they_say(inputs: Inputs) -> None:
    wanted = {"learned": ("fail", "pass", "pass"), "open": ("fail", "fail", "fail")}
    found = comparisons(inputs)
    cases = [case for cell in found.values() for case in cell["cases"]]
    assert len({case["kind"] for case in cases}) == 4
    assert all(cell["mode"] == "greedy" for cell in found.values())
    for case in cases:
        outcomes = tuple(answer["outcome"] for answer in case["answers"])
        assert outcomes == wanted.get(case["kind"], outcomes)
        assert outcomes[1:] == {"lost": ("pass", "fail"), "gained": ("fail", "pass")}.get(case["kind"], outcomes[1:])


def test_tasks_are_counted_by_what_became_of_them(inputs: Inputs, built: Built) -> None:
    cell = "coding/max"
    base, expert, student = (
        {task: row["outcome"] == "pass" for task, row in model.first_rollouts(cell, "greedy").items()}
        for model in (inputs.base, inputs.experts[cell], inputs.student)
    )
    counts = {
        "learned": sum(not base[t] and expert[t] and student[t] for t in base),
        "lost": sum(expert[t] and not student[t] for t in base),
        "gained": sum(student[t] and not expert[t] for t in base),
        "open": sum(not (base[t] or expert[t] or student[t]) for t in base),
    }
    assert built[0]["outcomes"][cell] == {"mode": "greedy", "num_tasks": 60, "counts": counts}


def test_training_groups_are_the_first_and_the_last(inputs: Inputs) -> None:
    first, last = training_groups(inputs)["coding/high"]
    assert (first["step"], last["step"], first["num_rollouts"], len(first["rollouts"])) == (5, 25, 8, 4)


def test_channels_are_split_at_special_tokens_only() -> None:
    assert split_channels("<|think|>a<b=2<|answer|><|end|>") == [
        {"name": "think", "text": "a<b=2", "times": 1},
        {"name": "answer", "text": "", "times": 1},
        {"name": "end", "text": "", "times": 1},
    ]
    assert split_channels("loose<|answer|>6")[0] == {"name": "", "text": "loose", "times": 1}
    assert split_channels("<|think|>" * 40 + "2") == [
        {"name": "think", "text": "", "times": 39},
        {"name": "think", "text": "2", "times": 1},
    ]
    assert split_channels("") == []
