"""Workers and other child processes: each in its own group, ended by whoever started it, dead when we are dead."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flows.errors import DiskFullError, InterruptedRunError, StageFailedError

GRACE_S = 5.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Job:
    """One call of ``function`` with the request at ``request_path``, in a process of its own."""

    stage: str
    function: str
    request_path: Path
    log_path: Path
    num_threads: int


class Children:
    """The workers of one run. ``stop`` and ``kill`` may be called from any thread or signal handler.

    ``modules`` are imported ahead by the process from which the workers are forked.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.stopping = threading.Event()
        self._modules = list(dict.fromkeys(modules))
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        self._nursery: subprocess.Popen[bytes] | None = None
        self._jobs: socket.socket | None = None

    def run(self, job: Job) -> Mapping[str, float]:
        """Runs a worker to its end and returns its metrics.

        Raises StageFailedError when it fails or dies, DiskFullError, and InterruptedRunError after ``stop``.
        """
        with job.log_path.open("ab") as log:
            channel = self._send(job, log)
        answer: dict[str, Any] = {}
        with channel, channel.makefile("rb") as lines:
            answer |= json.loads(lines.readline() or b"{}")
            pid = int(answer.get("pid", 0))
            with self._watched(pid):
                while "status" not in answer and (line := lines.readline()):
                    answer |= json.loads(line)
        if self.stopping.is_set() and "metrics" not in answer:
            raise InterruptedRunError(f"stage {job.stage} was stopped")
        return _metrics(job, answer)

    def warm_up(self) -> None:
        """Starts importing what the workers will need, while something else takes its time."""
        with self._lock:
            if not self.stopping.is_set():
                self._open_nursery()

    def stop(self) -> None:
        """No new worker starts from here on; the running ones get SIGTERM, and SIGKILL after ``GRACE_S``."""
        self.stopping.set()
        for pid in list(self._groups):
            signal_group(pid, signal.SIGTERM)
        later = threading.Timer(GRACE_S, self._kill_groups)
        later.daemon = True
        later.start()

    def kill(self) -> None:
        """At once, without grace; ends the nursery too."""
        self.stopping.set()
        self._kill_groups()
        with self._lock:
            if self._jobs is not None:
                self._jobs.close()
            if self._nursery is not None:
                end_child(self._nursery, grace_s=0.0)
            self._nursery = self._jobs = None

    def _kill_groups(self) -> None:
        for pid in list(self._groups):
            signal_group(pid, signal.SIGKILL)

    def _send(self, job: Job, log: IO[bytes]) -> socket.socket:
        """Hands the job over; returns the channel on which its worker is heard of."""
        ours, theirs = socket.socketpair()
        row = {
            "request": str(job.request_path),
            "function": job.function,
            "num_threads": job.num_threads,
            "environment": _thread_counts(job.num_threads),
        }
        with theirs, self._lock:
            if self.stopping.is_set():
                ours.close()
                raise InterruptedRunError("the run was stopped")
            jobs = self._open_nursery()
            socket.send_fds(jobs, [json.dumps(row).encode()], [log.fileno(), theirs.fileno()])
        return ours

    def _open_nursery(self) -> socket.socket:
        """Starts it where there is none, and again should it have died."""
        if self._nursery is not None and self._jobs is not None and self._nursery.poll() is None:
            return self._jobs
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "flows.nursery", str(theirs.fileno()), *self._modules]
        with theirs:
            self._nursery = start_child(command, None, worker_environment(), pass_fds=[theirs.fileno()])
        self._jobs = ours
        return ours

    @contextlib.contextmanager
    def _watched(self, pid: int) -> Iterator[None]:
        """While inside, ``stop`` reaches the worker's group; afterwards nothing of the group is left."""
        if pid == 0:
            yield
            return
        self._groups.add(pid)
        if self.stopping.is_set():
            signal_group(pid, signal.SIGTERM)
        try:
            yield
        finally:
            signal_group(pid, signal.SIGKILL)
            self._groups.discard(pid)


def start_child(
    command: Sequence[str], log: IO[bytes] | None, environment: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Starts a process group whose stdin is a pipe that only this process holds open: its end is our end.

    The child watches that pipe (``flows.lifeline``) and ends its own group when it closes.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT if log is not None else None,
        env=dict(environment),
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )


def end_child(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """SIGTERM, SIGKILL after ``grace_s``, and a last sweep of the group: nothing that it started stays behind."""
    if process.poll() is None and grace_s > 0:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def signal_group(pid: int, number: int) -> None:
    """Signals a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def worker_environment() -> dict[str, str]:
    """This process's environment without the services' settings; what a worker may read of it is fixed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return kept | fixed | _thread_counts(1)


def _thread_counts(num_threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: str(num_threads) for name in names}


def _metrics(job: Job, answer: Mapping[str, Any]) -> Mapping[str, float]:
    """What a worker's words and its exit status come to."""
    status = answer.get("status", 0)
    if "metrics" in answer and status == 0:
        metrics: Mapping[str, float] = answer["metrics"]
        return metrics
    if answer.get("error") == "disk":
        raise DiskFullError(f"disk full in stage {job.stage}: {answer['message']}; free some space and run again")
    if "message" in answer:
        raise StageFailedError(f"stage {job.stage} failed: {answer['message']}; its log: {job.log_path}")
    if status < 0:
        name = signal.Signals(-status).name
        cause = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
        raise StageFailedError(
            f"the worker of stage {job.stage} was killed ({name}{cause}); run again: it goes on from its checkpoint"
        )
    raise StageFailedError(f"the worker of stage {job.stage} ended without a word; its log: {job.log_path}")
