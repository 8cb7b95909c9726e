"""A child's tie to its parent: when the parent is gone, however it went, the child's whole process group ends."""

import contextlib
import os
import signal
import threading
from pathlib import Path


def tie_to_parent() -> int:
    """Watches the pipe on stdin, whose other end only the parent holds, and frees stdin; returns the pipe."""
    descriptor = os.dup(0)
    os.set_inheritable(descriptor, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    watch(descriptor)
    return descriptor


def watch(descriptor: int) -> None:
    """Ends the caller's process group when the pipe closes. A fork has to watch again: threads do not survive it."""
    threading.Thread(target=_wait, args=(descriptor,), name="nonet-lifeline", daemon=True).start()


def process_start(pid: int) -> str:
    """The kernel's start time of a process: with the pid its identity. Empty when there is no such process.

    Without a /proc the answer is only whether the process is there.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "there"


def _wait(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):
            pass
    os.killpg(os.getpgid(0), signal.SIGKILL)
