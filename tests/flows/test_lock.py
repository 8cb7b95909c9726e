"""The workspace's lease: who holds it, when it is stale, and what a holder that lost it may still do."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.errors import WorkspaceHeldError
from flows.lifeline import process_start
from flows.lock import STALE_S, hold, holder


def write_lease(root: Path, **changes: object) -> None:
    row = {
        "token": 7,
        "host": socket.gethostname(),
        "pid": os.getppid(),
        "process_start": process_start(os.getppid()),
        "command": "nonet run other.toml",
        "since": 0.0,
    }
    (root / "lock.json").write_text(json.dumps(row | changes))


def age(root: Path, seconds: float) -> None:
    status = (root / "lock.json").stat()
    os.utime(root / "lock.json", (status.st_atime - seconds, status.st_mtime - seconds))


def test_a_live_owner_is_named(tmp_path: Path) -> None:
    write_lease(tmp_path)
    message = rf"is held by process {os.getppid()} on {socket.gethostname()} \(nonet run other\.toml, since"
    with pytest.raises(WorkspaceHeldError, match=message), hold(tmp_path):
        pass
    owner = holder(tmp_path)
    assert owner is not None
    assert owner.token == 7


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"pid": 2**22 + 1, "process_start": "1"}, 0.0),
        ({"process_start": "1"}, 0.0),
        ({}, STALE_S + 1),
        ({"host": "elsewhere"}, STALE_S + 1),
    ],
    ids=["process gone", "pid reused", "no heartbeat", "other host without heartbeat"],
)
def test_a_stale_lease_is_taken_over_with_a_higher_token(
    tmp_path: Path, changes: dict[str, object], seconds: float
) -> None:
    write_lease(tmp_path, **changes)
    age(tmp_path, seconds)
    assert holder(tmp_path) is None
    with hold(tmp_path) as lease:
        assert lease.token == 8
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()


def test_another_host_with_a_heartbeat_holds(tmp_path: Path) -> None:
    write_lease(tmp_path, host="elsewhere", pid=1, process_start="1")
    with pytest.raises(WorkspaceHeldError, match="process 1 on elsewhere"), hold(tmp_path):
        pass
    assert holder(tmp_path) is not None


def test_only_the_newest_token_commits(tmp_path: Path) -> None:
    with hold(tmp_path) as lease:
        (tmp_path / "new").write_text("1")
        lease.commit(tmp_path / "new", tmp_path / "final")
        assert (tmp_path / "final").read_text() == "1"
        write_lease(tmp_path, token=lease.token + 1)
        (tmp_path / "new").write_text("2")
        with pytest.raises(WorkspaceHeldError, match="was taken over by process"):
            lease.commit(tmp_path / "new", tmp_path / "final")
    assert (tmp_path / "final").read_text() == "1"
    assert json.loads((tmp_path / "lock.json").read_text())["token"] == lease.token + 1


def test_a_released_or_unreadable_lease_is_free(tmp_path: Path) -> None:
    with hold(tmp_path):
        assert holder(tmp_path) is not None
    assert holder(tmp_path) is None
    (tmp_path / "lock.json").write_text("{")
    with hold(tmp_path):
        assert holder(tmp_path) is not None


def test_the_lease_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    code = "import os, sys, pathlib, flows.lock as l\nwith l.hold(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    with hold(tmp_path) as lease:
        assert lease.token == 2
