"""Which stage starts when: in the listed order, as soon as its inputs are there and enough slots are free."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from flows.errors import StageFailedError
from flows.graph import Graph
from flows.specs import StageResult, StageSpec
from flows.stages import Inputs


class Started(Protocol):
    """What starting a stage returns: a Prefect future, or a plain one."""

    def result(self) -> StageResult: ...

    def add_done_callback(self, fn: Callable[[Any], None]) -> None: ...


class Ended(Protocol):
    """The queue of the stages whose work has ended."""

    def put(self, stage: str, /) -> None: ...

    def get(self) -> str: ...


class Observer(Protocol):
    """Is told what happens to the stages, in the scheduling thread."""

    def found(self, result: StageResult) -> None: ...

    def ended(self, result: StageResult) -> None: ...

    def failed(self, stage: str, error: BaseException) -> None: ...


@dataclass
class Schedule:
    """Runs the listed stages of a graph. ``num_slots`` counts threads: a stage takes as many slots as it has threads.

    ``find`` returns an earlier result (then nothing starts), ``start`` begins the work. A failed stage stops only what
    needs it; any other error keeps everything from starting that has not.
    """

    graph: Graph
    num_slots: int
    find: Callable[[StageSpec, Inputs], StageResult | None]
    start: Callable[[StageSpec, Inputs], Started]
    observer: Observer
    ended: Ended = field(default_factory=queue.SimpleQueue[str])
    results: dict[str, StageResult] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)
    _running: dict[str, Started] = field(default_factory=dict)
    _failed: dict[str, StageFailedError] = field(default_factory=dict)
    _fatal: BaseException | None = None

    def __call__(self, stage: str) -> None:
        """Lists a stage: the earlier, the sooner it gets a slot."""
        assert stage in self.graph, stage
        self._waiting.append(stage)

    def run(self) -> dict[str, StageResult]:
        """Every result by stage name. Raises what stopped the run, or StageFailedError naming what failed."""
        while True:
            if self._fatal is None:
                self._start_ready()
            if not self._running:
                break
            self._collect(self.ended.get())
        if self._fatal is not None:
            raise self._fatal
        if self._failed:
            raise StageFailedError(self._describe_failures())
        assert not self._waiting, self._waiting
        return self.results

    def _start_ready(self) -> None:
        """Adopts what is there already, starts what is ready; waits for room rather than let a later stage overtake."""
        moved = True
        while moved:
            moved = False
            for stage in list(self._waiting):
                spec = self.graph[stage]
                if not all(name in self.results for name in spec.inputs.values()):
                    continue
                inputs = {role: self.results[name] for role, name in spec.inputs.items()}
                if (result := self.find(spec, inputs)) is not None:
                    self.results[stage] = result
                    self.observer.found(result)
                    moved = True
                elif spec.resources.num_threads <= self._free_slots():
                    self._running[stage] = future = self.start(spec, inputs)
                    future.add_done_callback(partial(self._tell_end, stage))
                else:
                    return
                self._waiting.remove(stage)

    def _tell_end(self, stage: str, _: object) -> None:
        self.ended.put(stage)

    def _free_slots(self) -> int:
        return self.num_slots - sum(self.graph[stage].resources.num_threads for stage in self._running)

    def _collect(self, stage: str) -> None:
        try:
            result = self._running.pop(stage).result()
        except StageFailedError as error:
            self._failed[stage] = error
            self.observer.failed(stage, error)
        except BaseException as error:
            self._fatal = self._fatal or error
        else:
            self.results[stage] = result
            self.observer.ended(result)

    def _describe_failures(self) -> str:
        first = next(iter(self._failed.values()))
        more = f" ({len(self._failed) - 1} more stages failed)" if len(self._failed) > 1 else ""
        waiting = f"; {len(self._waiting)} stages wait for it" if self._waiting else ""
        return f"{first}{more}{waiting}"
