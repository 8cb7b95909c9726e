"""The process from which workers are forked: torch is imported once a run, not once a stage (2 s of work each).

``python -m flows.nursery SOCKET MODULE...`` takes jobs from the socket; between jobs it imports the modules, so that
a stage that comes early need not wait for them. A job comes as one JSON line with two descriptors: its log, and a
channel on which the run reads ``{"pid": …}``, what the worker reports, and ``{"status": …}`` when it has ended.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flows.lifeline import tie_to_parent, watch
from flows.worker import main as run_worker

_MAX_JOB_BYTES = 1 << 16
_QUIET_S = 0.2
_LATE_IMPORTS = ("datasets", "torch._dynamo")  # what a first save of rows and a first torch optimizer import: 4 s


@dataclass(frozen=True, slots=True)
class Tools:
    """The descriptors of the nursery itself, which no worker may keep."""

    jobs: socket.socket
    lifeline: int
    wakeup: int


def main(jobs: socket.socket, lifeline: int, modules: Sequence[str]) -> None:
    """Forks a worker a job until the socket closes."""
    wakeup, bell = os.pipe()
    os.set_blocking(bell, False)
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    tools = Tools(jobs, lifeline, wakeup)
    channels: dict[int, int] = {}
    waiting = list(modules)
    sources: list[Any] = [jobs, wakeup]
    while True:
        ready, _, _ = select.select(sources, [], [], _QUIET_S if waiting else None)
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap(channels)
        if jobs in ready:
            message, descriptors, _, _ = socket.recv_fds(jobs, _MAX_JOB_BYTES, 2)
            if not message:
                return
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            gc.freeze()  # the workers' collections then leave the shared pages alone
            if (pid := os.fork()) == 0:
                _become_worker(tools, channels, json.loads(message), descriptors)
            log, channel = descriptors
            os.close(log)
            channels[pid] = channel
            _tell(channel, {"pid": pid})
        if not ready and waiting:
            with contextlib.suppress(Exception):  # the stage itself will say what is wrong with its module
                importlib.import_module(waiting.pop(0))
            if not waiting and "torch" in sys.modules:
                waiting = [name for name in _LATE_IMPORTS if name not in sys.modules]


def _become_worker(
    tools: Tools, channels: Mapping[int, int], job: Mapping[str, Any], descriptors: Sequence[int]
) -> NoReturn:
    """The child's side of the fork: its own group, log and thread count; then the stage, and the end."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (tools.jobs.detach(), tools.wakeup, *channels.values()):
        os.close(other)
    watch(tools.lifeline)
    log, channel = descriptors
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(job["environment"])
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(job["num_threads"])
    code = run_worker(Path(job["request"]), job["function"], channel)
    atexit._run_exitfuncs()  # what a stage left to be tidied; taking down the inherited modules would cost a second
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _reap(channels: dict[int, int]) -> None:
    while channels:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        channel = channels.pop(pid)
        _tell(channel, {"status": os.waitstatus_to_exitcode(status)})
        os.close(channel)


def _tell(channel: int, row: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(channel, json.dumps(row).encode() + b"\n")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), tie_to_parent(), sys.argv[2:])
