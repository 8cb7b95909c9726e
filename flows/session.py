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

from flows.errors import INTERRUPTED, InterruptedRunError
from flows.graph import Graph, build_graph
from flows.lineage import ancestors, lineage_mermaid, lineage_text
from flows.lock import hold
from flows.plan import StagePlan, check_functions, make_plan
from flows.progress import Progress
from flows.recipe import Recipe, load_recipe
from flows.schedule import Schedule, Started
from flows.specs import StageResult, StageSpec
from flows.stages import Inputs, Shop, find_result
from flows.store import Store
from flows.summary import matrix_rows, matrix_text
from flows.tracking import Finished, Tracker, is_tracked
from flows.workspace import Workspace, open_workspace, write_json


@dataclass(frozen=True)
class Session:
    """One run. Told by the schedule what happens to the stages, it prints and tracks.

    ``results`` fills while it runs; ``ran`` names what this run made itself.
    """

    workspace: Workspace
    recipe: Recipe
    graph: Graph
    plans: dict[str, StagePlan]
    forced: frozenset[str]
    shop: Shop
    progress: Progress
    tracker: Tracker
    results: dict[str, StageResult] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        """The cells in the order in which their experts can start."""
        return [name.removeprefix("expert/") for name in self.graph if name.startswith("expert/")]

    @property
    def is_complete(self) -> bool:
        """Whether every stage had its result when the session was opened."""
        return all(plan.status == "cached" for plan in self.plans.values())

    def schedule(self, start: Callable[[StageSpec, Inputs], Started]) -> Schedule:
        """``start`` begins a stage's work elsewhere and returns its future."""

        def begin(spec: StageSpec, inputs: Inputs) -> Started:
            self.progress.start(spec.name, self.plans[spec.name].reason)
            return start(spec, inputs)

        return Schedule(self.graph, self.recipe.resources.num_slots, self._find, begin, observer=self)

    def adopt(self) -> None:
        """For a complete session: all results at once. MLflow gets what it lacks of them."""
        for plan in self.plans.values():
            assert plan.result is not None, plan
            self.found(plan.result)

    def found(self, result: StageResult) -> None:
        self.progress.cached(result)
        self._keep(result)

    def ended(self, result: StageResult) -> None:
        self.progress.end(result)
        self.ran.append(result.stage)
        self._keep(result)

    def failed(self, stage: str, error: BaseException) -> None:
        self.progress.failed(stage, str(error))

    def close(self, status: str) -> None:
        """Waits for the tracker; the parent run gets the matrix and the lineage, where there are any."""
        last = self.results.get("export")
        nodes = ancestors(self.shop.store, last) if last is not None and self.ran else {}
        artifacts = {"lineage.mmd": lineage_mermaid(nodes), "lineage.txt": lineage_text(nodes)} if nodes else {}
        table = matrix_text(matrix_rows(self.results))
        self.tracker.close(status, artifacts, f"```\n{table}\n```" if table else "")

    def _find(self, spec: StageSpec, inputs: Inputs) -> StageResult | None:
        if spec.name in self.forced:
            return None
        planned = self.plans[spec.name].result  # every byte was checked when the session was opened
        return planned if planned is not None else find_result(self.shop, spec, inputs)

    def _keep(self, result: StageResult) -> None:
        self.results[result.stage] = result
        if not is_tracked(self.workspace, result):
            spec = self.graph[result.stage]
            self.tracker.submit(Finished(result, {role: self.results[name] for role, name in spec.inputs.items()}))


_open: dict[Path, Session] = {}


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
    """Reads and checks the recipe, holds the workspace, plans. Raises ValueError, WorkspaceHeldError, DiskFullError.

    Inside an open session of the same workspace it is that session: the command opens one while the Prefect server is
    still starting, a deployment only inside its flow.
    """
    if (current := _open.get(Path(workspace).absolute())) is not None:
        with _stopped_by_signals(current):  # Prefect has set its own handlers meanwhile
            yield current
        return
    loaded = load_recipe(Path(recipe), overrides)
    check_functions(loaded)
    graph = build_graph(loaded)
    place = open_workspace(Path(workspace), create=True)
    with hold(place.root) as lease:
        modules = [spec.function.partition(":")[0] for spec in graph.values()]
        shop = Shop.open(Store(place.store_path), lease, loaded.name, modules)
        plans = make_plan(graph, shop.store, loaded.name, shop.code, frozenset(force), check="full")
        progress = Progress(plans, loaded.resources.num_slots, silent=silent)
        tracker = Tracker(place, loaded, origin, progress.note)
        session = Session(place, loaded, graph, plans, frozenset(force), shop, progress, tracker)
        last = {"recipe": str(Path(recipe).absolute()), "overrides": list(overrides), "origin": origin}
        _open[place.root] = session
        try:
            with _stopped_by_signals(session), _remembered(session, last):
                yield session
        finally:
            del _open[place.root]


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
def _stopped_by_signals(session: Session) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the workers and let the run wind down; a second one ends everything at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    children = session.shop.children

    def handle(number: int, frame: FrameType | None) -> None:
        if children.stopping.is_set():
            children.kill()
            os._exit(INTERRUPTED)
        children.stop()
        session.progress.note(
            "stopping: finished stages are kept, the others go on from their last checkpoint next time"
        )

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
