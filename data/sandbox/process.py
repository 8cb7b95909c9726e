"""The sandbox of tier "process": model-written expressions run in a process that shares nothing with the grader.

The parent keeps a zygote (``data.sandbox.zygote``) that forks one confined child a job: no files, no network, no
privileges, empty environment, limits on time, memory and output. Only code and inputs go in, only strict JSON comes
out, and whoever holds the right results compares them here, in the parent.
"""

import contextlib
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from data.sandbox import zygote
from data.sandbox.zygote import Limits

TIER = "process"
DEFAULT_LIMITS = Limits()
START_S = 20.0
GRACE_S = 10.0  # beyond the child's own wall limit, before the zygote itself counts as hung

Value = None | bool | int | float | str | tuple["Value", ...] | list["Value"]
Status = Literal["ok", "error", "timeout", "killed", "infra"]


class SandboxUnavailableError(RuntimeError):
    """No sandbox on this machine: nothing may be graded, and nothing trained on the grades."""


@dataclass(frozen=True, slots=True)
class Job:
    """One Python expression in ``variables``, to be evaluated for every row of ``inputs``."""

    expression: str
    variables: tuple[str, ...]
    inputs: tuple[tuple[int | float | str | bool | None, ...], ...]


@dataclass(frozen=True, slots=True)
class JobResult:
    """``values`` holds one value an input when ``status`` is ok, else nothing; ``detail`` names the error or signal.

    ``infra`` means that the code never had its chance; all else is the code's own doing.
    """

    status: Status
    values: tuple[Value, ...] = ()
    detail: str = ""
    tier: str = TIER


class _GoneError(Exception):
    """The zygote died or hangs."""


class Sandbox:
    """Runs jobs one by one in fresh processes. May be used by several threads; not by a forked copy of this process."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, python: str = sys.executable):
        """Starts the zygote. Raises SandboxUnavailableError when it does not start, or fails an honest job."""
        self._limits = limits
        self._python = python
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None
        try:
            self._running()
        except _GoneError as error:
            raise SandboxUnavailableError(f"the sandbox does not start: {error}; try `{python} -V`") from error

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Results in order. A job that loses its zygote is tried once more in a new one; losing that too is its fault.

        When no new zygote starts, the jobs left are ``infra``; the next call tries again.
        """
        results: list[JobResult] = []
        with self._lock:
            for job in jobs:
                try:
                    results.append(self._run(job))
                except _GoneError as error:
                    left = len(jobs) - len(results)
                    return results + [JobResult("infra", detail=str(error))] * left
        return results

    def close(self) -> None:
        """Ends the zygote. A later ``run`` starts another."""
        with self._lock:
            self._drop()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, job: Job) -> JobResult:
        for _ in range(2):
            running = self._running()
            try:
                return _result(*running.call(job, self._limits.wall_s + GRACE_S))
            except _GoneError:
                self._drop()
        self._running()  # no zygote starts any more: that is not the job's fault
        return JobResult("killed", detail="its zygote died twice")

    def _running(self) -> "_Zygote":
        if self._zygote is None:
            self._zygote = _Zygote(self._python, self._limits)
            try:
                self._zygote.check()
            except _GoneError:
                self._drop()
                raise
        return self._zygote

    def _drop(self) -> None:
        if self._zygote is not None:
            self._zygote.end()
            self._zygote = None


class _Zygote:
    """The process at the other end of two pipes, both without blocking, so that a hung one is noticed."""

    def __init__(self, python: str, limits: Limits):
        arguments = [str(value) for value in limits]
        try:
            process = subprocess.Popen(
                [python, "-s", "-S", "-P", zygote.__file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0"},  # the order of a set must not change a reward
                cwd=tempfile.gettempdir(),
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise _GoneError(str(error)) from error
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._replies = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        self.end = weakref.finalize(self, _end, process)

    def check(self) -> None:
        """Waits for its greeting and runs an honest job."""
        status, greeting = self._receive(time.monotonic() + START_S)
        if status != zygote.HELLO:
            raise _GoneError(f"it greeted with {status!r} {greeting!r}")
        result = _result(*self.call(Job("a+len(b)", ("a", "b"), ((1, "no"),)), START_S))
        if result.values != (3,):
            raise _GoneError(f"an honest job ended in {result.status} {result.detail}")

    def call(self, job: Job, timeout_s: float) -> tuple[bytes, bytes]:
        deadline = time.monotonic() + timeout_s
        payload = json.dumps(asdict(job)).encode()
        self._send(struct.pack(">I", len(payload)) + payload, deadline)
        return self._receive(deadline)

    def _receive(self, deadline: float) -> tuple[bytes, bytes]:
        header = self._read(5, deadline)
        return header[:1], self._read(struct.unpack(">I", header[1:])[0], deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            _wait(self._replies, select.POLLIN, deadline)
            chunk = os.read(self._replies, size - len(data))
            if not chunk:
                raise _GoneError("the zygote ended")
            data += chunk
        return data

    def _send(self, data: bytes, deadline: float) -> None:
        while data:
            _wait(self._requests, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._requests, data) :]
            except BrokenPipeError:
                raise _GoneError("the zygote ended") from None


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise _GoneError("the zygote hangs")


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _result(status: bytes, output: bytes) -> JobResult:
    if status == zygote.NOT_STARTED:
        return JobResult("infra", detail=output.decode(errors="replace"))
    if status == zygote.TIMED_OUT:
        return JobResult("timeout")
    if status != zygote.EXITED:
        name = output.decode(errors="replace")
        return JobResult("timeout" if name == signal.strsignal(signal.SIGXCPU) else "killed", detail=name)
    try:
        answer = json.loads(output, parse_constant=_refuse)
        if "values" in answer:
            return JobResult("ok", tuple(_decode(value) for value in answer["values"]))
        return JobResult("error", detail=_text(answer["error"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return JobResult("error", detail="it wrote something that is no result")


def _decode(value: Any) -> Value:
    """The value that strict JSON stands for: a tuple comes as ``{"tuple": [...]}``."""
    if isinstance(value, dict):
        if list(value) != ["tuple"] or not isinstance(value["tuple"], list):
            raise ValueError("not a value")
        return tuple(_decode(v) for v in value["tuple"])
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a value")
    decoded: Value = value
    return decoded


def _text(name: object) -> str:
    """A name that a child wrote, short and fit for any file: half a surrogate pair could not be stored."""
    return str(name)[:80].encode(errors="replace").decode()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value")
