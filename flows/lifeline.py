"""A child's tie to its parent: when the parent is gone, however it went, the child's whole process group ends."""

import contextlib
import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def tie_to_parent() -> None:
    """Watches the pipe on stdin, and on Linux asks the kernel too, which also reaches a stopped process."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor = os.dup(0)
    os.set_inheritable(descriptor, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_watch, args=(descriptor,), name="nonet-lifeline", daemon=True).start()
    if os.getppid() != parent:
        _end()


def _watch(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):
            pass
    _end()


def _end() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)
