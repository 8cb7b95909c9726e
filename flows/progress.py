"""Lines of progress: one when a stage starts, one when it ends. Plain text when not on a terminal."""

import threading
import time
from collections.abc import Mapping

import click

from flows.plan import StagePlan
from flows.specs import StageResult

_NUM_METRICS = 3


class Progress:
    """Counts stages of one run and tells the time that is left, where earlier runs say how long stages take."""

    def __init__(self, plans: Mapping[str, StagePlan], num_slots: int, *, silent: bool = False) -> None:
        todo = {name: plan for name, plan in plans.items() if plan.status != "cached"}
        self._left = {name: plan.estimate_s for name, plan in todo.items()}
        self._total = len(todo)
        self._num_slots = num_slots
        self._silent = silent
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._width = max((len(name) for name in todo), default=0)

    def start(self, stage: str, note: str) -> None:
        self._say("▶", "cyan", stage, note)

    def end(self, result: StageResult) -> None:
        self._left.pop(result.stage, None)
        self._say("✓", "green", result.stage, f"{format_s(result.duration_s):>6}  {figures(result)}{self._outlook()}")

    def cached(self, result: StageResult) -> None:
        if result.stage in self._left:
            del self._left[result.stage]
            self._say("=", "blue", result.stage, "inputs came out as before: kept" + self._outlook())

    def failed(self, stage: str, message: str) -> None:
        self._left.pop(stage, None)
        self._say("✗", "red", stage, message)

    def note(self, message: str) -> None:
        if not self._silent:
            with self._lock:
                click.echo(message)

    def _say(self, sign: str, colour: str, stage: str, text: str) -> None:
        if self._silent:
            return
        elapsed = time.monotonic() - self._begun
        done = self._total - len(self._left)
        head = f"{int(elapsed // 60):3d}:{int(elapsed % 60):02d} {done:3d}/{self._total}"
        with self._lock:
            click.echo(f"{head} {click.style(sign, fg=colour)} {stage:<{self._width}}  {text}".rstrip())

    def _outlook(self) -> str:
        known = [seconds for seconds in self._left.values() if seconds is not None]
        if not known or len(known) < len(self._left):
            return ""
        return f"  (about {format_s(sum(known) / self._num_slots)} left)"


def figures(result: StageResult) -> str:
    """The first few of a stage's metrics, on one line."""
    return " · ".join(f"{name} {value:.4g}" for name, value in list(result.metrics.items())[:_NUM_METRICS])


def format_s(seconds: float) -> str:
    """``8.3s``, ``2m05s``, ``1h02m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds < 3600:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
