"""All that one run of a recipe holds while it lasts: the workspace's lease, the plan, the workers, the tracker."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from flows.errors import INTERRUPTED, InterruptedRunError
from flows.graph import Graph, build_graph
from flows.launch import Children
from flows.lineage import ancestors, lineage_mermaid
from flows.lock import hold
from flows.plan import StagePlan, check_functions, make_plan
from flows.progress import Progress
from flows.recipe import Recipe, load_recipe
from flows.schedule import Schedule, Started
from flows.specs import StageResult, StageSpec
from flows.stages import Inputs, Shop, find_result
from flows.store import Store
from flows.tracking import Finished, Tracker, is_tracked
from flows.workspace import Workspace, open_workspace, write_json


@dataclass(frozen=True)
class Session:
    """One run. Told by the schedule what happens to the stages, it prints and tracks."""

    workspace: Workspace
    recipe: Recipe
    graph: Graph
    plans: dict[str, StagePlan]
    forced: frozenset[str]
    shop: Shop
    progress: Progress
    tracker: Tracker
    results: dict[str, StageResult] = field(default_factory=dict)

    @property
    def cells(self) -> list[str]:
        """The cells in the order in which their experts can start."""
        return [name.removeprefix("expert/") for name in self.graph if name.startswith("expert/")]

    def schedule(self, start: Callable[[StageSpec, Inputs], Started]) -> Schedule:
        """``start`` begins a stage's work elsewhere and returns its future."""

        def begin(spec: StageSpec, inputs: Inputs) -> Started:
            self.progress.start(spec.name, self.plans[spec.name].reason)
            return start(spec, inputs)

        def find(spec: StageSpec, inputs: Inputs) -> StageResult | None:
            return None if spec.name in self.forced else find_result(self.shop, spec, inputs)

        return Schedule(self.graph, self.recipe.resources.num_slots, find, begin, observer=self)

    def found(self, result: StageResult) -> None:
        self.progress.cached(result)
        self._keep(result)

    def ended(self, result: StageResult) -> None:
        self.progress.end(result)
        self._keep(result)

    def failed(self, stage: str, error: BaseException) -> None:
        self.progress.failed(stage, str(error))

    def _keep(self, result: StageResult) -> None:
        self.results[result.stage] = result
        if not is_tracked(self.workspace, result):
            spec = self.graph[result.stage]
            self.tracker.submit(Finished(result, {role: self.results[name] for role, name in spec.inputs.items()}))

    def close(self, status: str) -> None:
        """Waits for the tracker; the parent run gets the lineage of what there is."""
        last = self.results.get("export")
        nodes = ancestors(self.shop.store, last) if last is not None else {}
        self.tracker.close(status, {"lineage.mmd": lineage_mermaid(nodes)} if nodes else {})


@contextlib.contextmanager
def open_session(
    recipe: str,
    workspace: str,
    overrides: Sequence[str] = (),
    force: Sequence[str] = (),
    origin: str = "run",
    *,
    silent: bool = False,
) -> Iterator[Session]:
    """Holds the workspace, reads and checks the recipe, plans. Raises ValueError, WorkspaceHeldError, DiskFullError."""
    loaded = load_recipe(Path(recipe), overrides)
    check_functions(loaded)
    graph = build_graph(loaded)
    place = open_workspace(Path(workspace), create=True)
    with hold(place.root) as lease:
        modules = [spec.function.partition(":")[0] for spec in graph.values()]
        shop = Shop.open(Store(place.store_path), lease, loaded.name, modules)
        plans = make_plan(graph, shop.store, loaded.name, shop.code, frozenset(force))
        progress = Progress(plans, loaded.resources.num_slots, silent=silent)
        tracker = Tracker(place, loaded, origin, progress.note)
        session = Session(place, loaded, graph, plans, frozenset(force), shop, progress, tracker)
        last = {"recipe": str(Path(recipe).absolute()), "overrides": list(overrides), "origin": origin}
        with _stopped_by_signals(shop.children, progress), _remembered(session, last):
            yield session


def send_backlog(**parameters: Any) -> None:
    """For when there is nothing to run, but MLflow lacks earlier results: adopting each stage sends it."""
    with open_session(**parameters) as session:

        def refuse(spec: StageSpec, inputs: Inputs) -> Started:
            raise AssertionError(f"{spec.name} has a result")

        schedule = session.schedule(refuse)
        for stage in session.graph:
            schedule(stage)
        schedule.run()


@contextlib.contextmanager
def _remembered(session: Session, row: Mapping[str, object]) -> Iterator[None]:
    """``last.json`` says what ran and how it ended, ``recipe.json`` holds the resolved recipe; MLflow hears it too."""
    workspace = session.workspace
    row = {**row, "name": session.recipe.name, "started": time.time()}
    write_json(workspace.root / "recipe.json", session.recipe.model_dump(mode="json"))
    workspace.write_last({**row, "state": "running"})
    state, status = "failed", "FAILED"
    try:
        yield
        state, status = "finished", "FINISHED"
    except InterruptedRunError:
        state, status = "interrupted", "KILLED"
        raise
    finally:
        session.shop.children.kill()
        with contextlib.suppress(OSError):
            workspace.write_last({**row, "state": state, "ended": time.time()})
        session.close(status)


@contextlib.contextmanager
def _stopped_by_signals(children: Children, progress: Progress) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the workers and let the run wind down; a second one ends everything at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if children.stopping.is_set():
            children.kill()
            os._exit(INTERRUPTED)
        children.stop()
        progress.note("stopping: finished stages are kept, the others go on from their last checkpoint next time")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
