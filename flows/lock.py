"""One writer a workspace: a lease with an owner, a heartbeat and a fencing token that every commit is checked against.

``lock.json`` names the owner; its mtime is the heartbeat. A lease is stale when its process is gone (same host) or its
heartbeat is older than ``STALE_S``; whoever takes it over raises the token, and a holder that wakes up later cannot
commit. ``lock.guard`` is only locked (flock) for the moment of looking and changing.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.errors import WorkspaceHeldError
from flows.lifeline import process_start

HEARTBEAT_S = 5.0
STALE_S = 60.0


@dataclass(frozen=True, slots=True)
class Owner:
    """``process_start`` is the kernel's start time of the process, so that a reused pid is not mistaken for it."""

    token: int
    host: str
    pid: int
    process_start: str
    command: str
    since: float

    def describe(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} ({self.command}, since {since})"


class Lease:
    """Held by this process; ``lost`` is set when another run has taken over."""

    def __init__(self, root: Path, token: int) -> None:
        self.root = root
        self.token = token
        self.lost = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="nonet-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def commit(self, temporary: Path, final: Path) -> None:
        """Renames a finished file into place, only while this lease is the newest. Raises WorkspaceHeldError."""
        with _guard(self.root):
            self._check()
            temporary.replace(final)
        _sync_folder(final.parent)

    def release(self) -> None:
        self._ended.set()
        self._thread.join(timeout=HEARTBEAT_S)
        with contextlib.suppress(OSError), _guard(self.root):
            if (owner := _read(self.root)) is not None and owner.token == self.token:
                _write(self.root, Owner(self.token, "", 0, "", "", 0.0))

    def _check(self) -> None:
        owner = _read(self.root)
        if owner is None or owner.token != self.token:
            self.lost.set()
            other = f" by {owner.describe()}" if owner is not None and owner.pid else ""
            raise WorkspaceHeldError(f"the workspace {self.root} was taken over{other}; this run stops without a trace")

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError), _guard(self.root):
                try:
                    self._check()
                except WorkspaceHeldError:
                    return
                os.utime(self.root / "lock.json")


@contextlib.contextmanager
def hold(root: Path) -> Iterator[Lease]:
    """Holds the workspace for the block. Raises WorkspaceHeldError that names the owner."""
    with _guard(root):
        owner = _read(root)
        if owner is not None and _is_alive(root, owner):
            raise WorkspaceHeldError(
                f"the workspace {root} is held by {owner.describe()}; wait for it, stop it, or use another --workspace"
            )
        token = (owner.token if owner is not None else 0) + 1
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:120]
        _write(root, Owner(token, socket.gethostname(), os.getpid(), process_start(os.getpid()), command, time.time()))
    lease = Lease(root, token)
    lease.start()
    try:
        yield lease
    finally:
        lease.release()


def holder(root: Path) -> Owner | None:
    """Who holds the workspace now; None when it is free or its lease is stale."""
    owner = _read(root)
    return owner if owner is not None and _is_alive(root, owner) else None


def _is_alive(root: Path, owner: Owner) -> bool:
    if owner.pid == 0:
        return False
    if owner.host == socket.gethostname() and process_start(owner.pid) != owner.process_start:
        return False
    return time.time() - (root / "lock.json").stat().st_mtime < STALE_S


@contextlib.contextmanager
def _guard(root: Path) -> Iterator[None]:
    with (root / "lock.guard").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(root: Path) -> Owner | None:
    try:
        return Owner(**json.loads((root / "lock.json").read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def _write(root: Path, owner: Owner) -> None:
    temporary = root / "lock.json.new"
    temporary.write_text(json.dumps(asdict(owner)) + "\n")
    temporary.replace(root / "lock.json")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
