"""What a worker process does: call one stage function and report once. The only place behind which torch is loaded.

Workers are forked by flows.nursery; ``python -m flows.worker REQUEST FUNCTION`` runs one by hand, say in a debugger.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from data.dotted import resolve
from data.stage import StageRequest
from flows.errors import is_disk_full
from flows.lifeline import process_start

_WAIT_FOR_PREDECESSOR_S = 20.0


def main(request_path: Path, function: str, report: int) -> int:
    """Sends ``{"metrics": …}`` on ``report``, returns 0; or ``{"error": user | disk | crash, "message": …}`` and 1."""
    try:
        request = StageRequest.load(request_path)
        with _alone(request.folder):
            metrics = resolve(function)(request)
        answer: dict[str, Any] = {"metrics": {name: float(value) for name, value in metrics.items()}}
    except Exception as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        answer = {"error": _kind(error), "message": _one_line(error)}
    os.write(report, json.dumps(answer).encode() + b"\n")
    return 0 if "metrics" in answer else 1


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One worker an attempt. A predecessor that outlived its run (it was stopped, say) is ended: the lease is ours."""
    with (folder / "worker.lock").open("a+") as file:
        deadline = time.monotonic() + _WAIT_FOR_PREDECESSOR_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"another worker is still busy in {folder}; end it and run again") from None
                _end_predecessor(file)
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"{os.getpid()} {process_start(os.getpid())}")
        file.flush()
        yield


def _end_predecessor(file: TextIO) -> None:
    file.seek(0)
    pid, _, start = file.read().partition(" ")
    if pid and process_start(int(pid)) == start:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), signal.SIGKILL)


def _kind(error: BaseException) -> str:
    if is_disk_full(error):
        return "disk"
    return "user" if isinstance(error, ValueError) else "crash"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:1000]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], report=1))
