"""The order in which stages start, the slots they take, and the time that is left."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from flows.errors import DiskFullError, StageFailedError
from flows.graph import build_graph
from flows.plan import StagePlan
from flows.progress import Progress, format_s
from flows.recipe import load_recipe
from flows.schedule import Schedule
from flows.specs import Resources, StageResult, StageSpec
from flows.stages import Inputs


def result_of(spec: StageSpec) -> StageResult:
    return StageResult(
        stage=spec.name,
        kind=spec.kind,
        function=spec.function,
        version=1,
        recipe="r",
        fingerprint="f",
        result_id=spec.name,
        folder=Path("1"),
        inputs={},
        config={},
        manifest={},
        sizes={},
        metrics={"loss": 0.5},
        git_commit="",
        code="",
        started=0.0,
        created=2.0,
        duration_s=2.0,
    )


class Bench:
    """Starts stages by hand: ``finish`` ends the one that has run longest. Keeps the order of all that happens."""

    def __init__(self, failing: Mapping[str, BaseException] | None = None) -> None:
        self.failing = failing or {}
        self.running: list[tuple[StageSpec, Future[StageResult]]] = []
        self.events: list[str] = []
        self.most_threads = 0

    def start(self, spec: StageSpec, inputs: Inputs) -> Future[StageResult]:
        future: Future[StageResult] = Future()
        self.running.append((spec, future))
        self.events.append(f"+{spec.name}")
        self.most_threads = max(self.most_threads, sum(s.resources.num_threads for s, _ in self.running))
        return future

    def finish(self) -> None:
        spec, future = self.running.pop(0)
        if spec.name in self.failing:
            future.set_exception(self.failing[spec.name])
        else:
            future.set_result(result_of(spec))

    def found(self, result: StageResult) -> None:
        self.events.append(f"={result.stage}")

    def ended(self, result: StageResult) -> None:
        self.events.append(f"-{result.stage}")

    def failed(self, stage: str, error: BaseException) -> None:
        self.events.append(f"!{stage}")


def specs(**threads: int) -> dict[str, StageSpec]:
    """a and b need nothing, c needs a, d needs b and c."""
    needs = {"a": [], "b": [], "c": ["a"], "d": ["b", "c"]}
    return {
        name: StageSpec(name, name, {}, {i: i for i in inputs}, "m:f", 1, Resources(threads.get(name, 1)))
        for name, inputs in needs.items()
    }


def run(
    graph: Mapping[str, StageSpec], slots: int, bench: Bench, listed: str, there: str = ""
) -> dict[str, StageResult]:
    schedule = Schedule(
        graph,
        slots,
        find=lambda spec, inputs: result_of(spec) if spec.name in there else None,
        start=bench.start,
        observer=bench,
        ended=EndOnGet(bench.finish),
    )
    for name in listed:
        schedule(name)
    return schedule.run()


class EndOnGet:
    """The schedule's queue: whoever waits on it lets a running stage end first."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish
        self.ended: list[str] = []

    def put(self, stage: str, /) -> None:
        self.ended.append(stage)

    def get(self) -> str:
        self.finish()
        return self.ended.pop(0)


def test_stages_start_in_the_listed_order_when_inputs_and_slots_are_there() -> None:
    bench = Bench()
    assert set(run(specs(), 2, bench, "abcd")) == set("abcd")
    assert bench.events == ["+a", "+b", "-a", "+c", "-b", "-c", "+d", "-d"]
    alone = Bench()
    run(specs(), 1, alone, "bacd")
    assert alone.events == ["+b", "-b", "+a", "-a", "+c", "-c", "+d", "-d"]


def test_a_stage_takes_as_many_slots_as_threads_and_is_not_overtaken() -> None:
    bench = Bench()
    run(specs(c=2), 2, bench, "acbd")
    assert bench.events == ["+a", "+b", "-a", "-b", "+c", "-c", "+d", "-d"]
    assert bench.most_threads == 2


def test_what_is_there_is_adopted() -> None:
    bench = Bench()
    run(specs(), 2, bench, "abcd", there="ac")
    assert bench.events == ["=a", "+b", "=c", "-b", "+d", "-d"]


def test_a_failure_stops_descendants_only_and_any_other_error_everything() -> None:
    bench = Bench({"a": StageFailedError("a broke")})
    with pytest.raises(StageFailedError, match="a broke; 2 stages wait for it"):
        run(specs(), 1, bench, "abcd")
    assert bench.events == ["+a", "!a", "+b", "-b"]
    full = Bench({"a": DiskFullError("no room")})
    with pytest.raises(DiskFullError, match="no room"):
        run(specs(), 1, full, "abcd")
    assert full.events == ["+a"]


def test_progress_tells_the_time_left_where_earlier_runs_do(capsys: pytest.CaptureFixture[str]) -> None:
    plans = {name: StagePlan(spec, "run", "forced", estimate_s=60.0) for name, spec in specs().items()}
    progress = Progress(plans, num_slots=2)
    progress.start("a", "forced")
    progress.end(result_of(specs()["a"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["0:00", "0/4", "▶", "a", "forced"]
    assert lines[1].split() == ["0:00", "1/4", "✓", "a", "2.0s", "loss", "0.5", "(about", "1m30s", "left)"]
    unknown = Progress({n: replace(p, estimate_s=None) for n, p in plans.items()}, num_slots=2)
    unknown.end(result_of(specs()["a"]))
    assert "left" not in capsys.readouterr().out


def test_durations_read_well() -> None:
    assert [format_s(s) for s in (8.26, 125, 3725)] == ["8.3s", "2m05s", "1h02m"]


def test_threads_come_from_the_recipe_and_never_exceed_the_slots(recipe: Path) -> None:
    graph = build_graph(load_recipe(recipe, ["resources.threads.midtrain=4", "resources.threads.expert=2"]))
    threads = {name: spec.resources.num_threads for name, spec in graph.items()}
    assert (threads["midtrain"], threads["expert/coding/low"], threads["distill"]) == (2, 2, 1)
