"""The worker process: ``python -m flows.worker REQUEST FUNCTION REPORT_FD`` calls one stage function and reports once.

The only module of flows behind which torch is loaded; the thread count comes with the environment (flows.launch).
"""

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.dotted import resolve
from data.stage import StageRequest
from flows.errors import is_disk_full
from flows.lifeline import tie_to_parent

_WAIT_FOR_PREDECESSOR_S = 20.0


def main(request_path: Path, function: str, report: int) -> int:
    """Sends ``{"metrics": …}`` on ``report``, returns 0; or ``{"error": user | disk | crash, "message": …}`` and 1."""
    os.set_inheritable(report, False)
    try:
        request = StageRequest.load(request_path)
        with _alone(request.folder):
            metrics = resolve(function)(request)
        answer: dict[str, Any] = {"metrics": {name: float(value) for name, value in metrics.items()}}
    except Exception as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        answer = {"error": _kind(error), "message": _one_line(error)}
    os.write(report, json.dumps(answer).encode())
    return 0 if "metrics" in answer else 1


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One worker an attempt: waits for a predecessor whose parent was killed and that is about to end."""
    with (folder / "worker.lock").open("w") as file:
        deadline = time.monotonic() + _WAIT_FOR_PREDECESSOR_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"another worker is still busy in {folder}; end it and run again") from None
                time.sleep(0.05)
        yield


def _kind(error: BaseException) -> str:
    if is_disk_full(error):
        return "disk"
    return "user" if isinstance(error, ValueError) else "crash"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:1000]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    tie_to_parent()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
