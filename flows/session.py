"""Everything that a run of a recipe holds while it lasts: the workspace's lease, the plan, the workers, the observers."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from flows.errors import INTERRUPTED, FlowError, InterruptedRunError
from flows.graph import Graph, build_graph
from flows.launch import Children
from flows.lock import hold
from flows.plan import StagePlan, check_functions, make_plan
from flows.progress import Progress
from flows.recipe import Recipe, load_recipe
from flows.schedule import Schedule, Started
from flows.specs import StageResult, StageSpec
from flows.stages import Inputs, Shop, find_result
from flows.store import Store
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

    @property
    def workspace_tag(self) -> str:
        return workspace_tag(self.workspace)

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

    def ended(self, result: StageResult) -> None:
        self.progress.end(result)

    def failed(self, stage: str, error: BaseException) -> None:
        self.progress.failed(stage, str(error))


@contextlib.contextmanager
def open_session(
    recipe_path: str, workspace_path: str, overrides: Sequence[str], force: Sequence[str], *, silent: bool
) -> Iterator[Session]:
    """Holds the workspace, reads and checks the recipe, plans. Raises ValueError, WorkspaceHeldError, DiskFullError."""
    recipe = load_recipe(Path(recipe_path), overrides)
    check_functions(recipe)
    graph = build_graph(recipe)
    workspace = open_workspace(Path(workspace_path), create=True)
    with hold(workspace.root) as lease:
        shop = Shop.open(Store(workspace.store_path), lease, recipe.name)
        plans = make_plan(graph, shop.store, recipe.name, shop.code, frozenset(force))
        progress = Progress(plans, recipe.resources.num_slots, silent=silent)
        session = Session(workspace, recipe, graph, plans, frozenset(force), shop, progress)
        with _remembered(workspace, recipe, recipe_path, overrides), _stopped_by_signals(shop.children, progress):
            try:
                yield session
            finally:
                shop.children.kill()


def workspace_tag(workspace: Workspace) -> str:
    """How a shared Prefect server tells the runs of one workspace from others."""
    return f"workspace:{workspace.root}"


@contextlib.contextmanager
def _remembered(workspace: Workspace, recipe: Recipe, recipe_path: str, overrides: Sequence[str]) -> Iterator[None]:
    """``last.json`` says what ran and how it ended, ``recipe.json`` holds the resolved recipe."""
    row = {"recipe": str(Path(recipe_path).absolute()), "overrides": list(overrides), "started": time.time()}
    write_json(workspace.root / "recipe.json", recipe.model_dump(mode="json"))
    workspace.write_last(row | {"state": "running"})
    state = "failed"
    try:
        yield
        state = "finished"
    except InterruptedRunError:
        state = "interrupted"
        raise
    finally:
        with contextlib.suppress(OSError):
            workspace.write_last(row | {"state": state, "ended": time.time()})


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
        progress.note("stopping: finished stages are kept, the others go on from their last checkpoint next time")
        children.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_named(error: BaseException) -> bool:
    """Whether an error already is one line for the user."""
    return isinstance(error, (FlowError, ValueError))
