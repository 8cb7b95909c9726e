"""Child processes: each in its own process group, ended by whoever started it, and dead when this process is dead."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.errors import DiskFullError, InterruptedRunError, StageFailedError

GRACE_S = 5.0
_POLL_S = 0.25
_MAX_REPORT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Job:
    """One call of ``function`` with the request at ``request_path``, in a process of its own."""

    stage: str
    function: str
    request_path: Path
    log_path: Path
    num_threads: int


class Children:
    """The workers of one run. ``stop`` may be called from any thread or signal handler."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(self, job: Job) -> Mapping[str, float]:
        """Runs a worker to its end and returns its metrics.

        Raises StageFailedError when it fails or dies, DiskFullError, and InterruptedRunError after ``stop``.
        """
        reader, writer = os.pipe()
        try:
            command = [sys.executable, "-m", "flows.worker", str(job.request_path), job.function, str(writer)]
            with job.log_path.open("ab") as log, self._started(command, log, writer, job.num_threads) as process:
                os.close(writer)
                writer = -1
                self._wait(process)
                report = _read_report(reader)
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        if self.stopping.is_set() and "metrics" not in report:
            raise InterruptedRunError(f"stage {job.stage} was stopped")
        return _metrics(job, process.returncode, report)

    def stop(self) -> None:
        """No new worker starts from here on; the running ones get SIGTERM, and SIGKILL after ``GRACE_S``."""
        self.stopping.set()
        for process in list(self._alive):
            _signal_group(process, signal.SIGTERM)

    def kill(self) -> None:
        """At once, without grace."""
        self.stopping.set()
        for process in list(self._alive):
            _signal_group(process, signal.SIGKILL)

    @contextlib.contextmanager
    def _started(
        self, command: Sequence[str], log: Any, report: int, num_threads: int
    ) -> Iterator[subprocess.Popen[bytes]]:
        with self._lock:
            if self.stopping.is_set():
                raise InterruptedRunError("the run was stopped")
            process = start_child(command, log, environment=worker_environment(num_threads), pass_fds=(report,))
            self._alive.add(process)
        try:
            yield process
        finally:
            end_child(process, grace_s=0.0)
            self._alive.discard(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        waited_s = 0.0
        while True:
            try:
                process.wait(timeout=_POLL_S)
                return
            except subprocess.TimeoutExpired:
                waited_s += _POLL_S if self.stopping.is_set() else 0.0
            if waited_s >= GRACE_S:
                _signal_group(process, signal.SIGKILL)


def start_child(
    command: Sequence[str], log: Any, *, environment: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process group whose stdin is a pipe that only this process holds open: its end is our end.

    The child watches that pipe (``flows.lifeline``) and ends its own group when it closes.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )


def end_child(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, SIGKILL after ``grace_s``, and a last sweep of the group: nothing that it started stays behind."""
    if process.poll() is None and grace_s > 0:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
    _signal_group(process, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def worker_environment(num_threads: int) -> dict[str, str]:
    """This process's environment without the services' settings, and with the thread counts fixed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return kept | threads | fixed


def _metrics(job: Job, returncode: int, report: Mapping[str, Any]) -> Mapping[str, float]:
    if "metrics" in report and returncode == 0:
        metrics: Mapping[str, float] = report["metrics"]
        return metrics
    if report.get("error") == "disk":
        raise DiskFullError(f"disk full in stage {job.stage}: {report['message']}; free some space and run again")
    if "message" in report:
        raise StageFailedError(f"stage {job.stage} failed: {report['message']}; its log: {job.log_path}")
    if returncode < 0:
        name = signal.Signals(-returncode).name
        cause = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
        raise StageFailedError(
            f"the worker of stage {job.stage} was killed ({name}{cause}); run again: it goes on from its checkpoint"
        )
    raise StageFailedError(f"the worker of stage {job.stage} ended with code {returncode}; its log: {job.log_path}")


def _read_report(reader: int) -> Mapping[str, Any]:
    """The one JSON object that a worker sends before it ends; empty when it died first."""
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError, json.JSONDecodeError):
        report = json.loads(os.read(reader, _MAX_REPORT_BYTES) or b"{}")
        if isinstance(report, dict):
            return report
    return {}


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
