"""The real command with a real Prefect server and real MLflow: runs, reruns, crashes, interruptions, bad input."""

import contextlib
import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.specs import StageResult

Command = Callable[..., Any]
Run = Callable[..., dict[str, StageResult]]
DESCENDANTS = {"expert/coding/high", "evaluate/coding/high", "distill", "evaluate/student", "export", "report"}


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def spends_at_most(seconds: float) -> Iterator[None]:
    """Processor time of the commands inside: what they take on an idle machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def only(workspace: Path, name: str) -> Path:
    paths = list((workspace / "store").rglob(name))
    assert len(paths) == 1
    return paths[0]


def prefect_states(workspace: Path) -> list[str]:
    """The state names of the flow runs, oldest first, from the server's own database."""
    with sqlite3.connect(workspace / "prefect" / "prefect.db") as connection:
        return [row[0] for row in connection.execute("select state_name from flow_run order by created")]


def slow(recipe: Path, kind: str = "corpus", function: str = "make_slowly") -> None:
    """Makes one kind of stage take two seconds."""
    recipe.write_text(recipe.read_text().replace(f'{kind} = "fake_stages:make"', f'{kind} = "fake_stages:{function}"'))


@pytest.fixture(scope="session")
def slow_hash() -> str:
    """What the slow stage writes when nothing interrupts it."""
    import hashlib

    value = ""
    for step in range(1, 41):
        value = hashlib.sha256(f"{value}{step}".encode()).hexdigest()
    return value


@pytest.mark.slow
def test_a_whole_run_and_a_rerun(recipe: Path, workspace: Path, nonet: Command) -> None:
    first = nonet("run", str(recipe))
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert re.search(r"18/18 ✓ report", first.stdout)
    for line in ("report ", "student ", "mlflow   mlflow ui --backend-store-uri sqlite:", "prefect  PREFECT_HOME="):
        assert line in first.stdout
    assert "\x1b" not in first.stdout

    with spends_at_most(seconds=3):
        again = nonet("run", str(recipe))
    assert "nothing to do" in again.stdout

    rerun = nonet("rerun", "coding/high", "--json")
    assert set(json.loads(rerun.stdout)["ran"]) == DESCENDANTS
    status = json.loads(nonet("status", "--json").stdout)
    attempts = {row["stage"]: Path(row["folder"]).name for row in status["stages"]}
    assert {stage for stage, attempt in attempts.items() if attempt == "2"} == DESCENDANTS
    assert status["last"]["state"] == "finished"
    assert status["held_by"] is None
    assert prefect_states(workspace) == ["Completed", "Completed"]
    check_task_runs(workspace)


def check_task_runs(workspace: Path) -> None:
    with sqlite3.connect(workspace / "prefect" / "prefect.db") as connection:
        rows = connection.execute("select name, state_name from task_run").fetchall()
    assert len(rows) == 18 + len(DESCENDANTS)
    assert {state for _, state in rows} == {"Completed"}
    assert {name for name, _ in rows} >= DESCENDANTS | {"corpus", "midtrain", "tasks/coding"}


@pytest.mark.slow
def test_a_killed_worker_goes_on_from_its_checkpoint(
    recipe: Path, workspace: Path, nonet: Command, run: Run, slow_hash: str
) -> None:
    slow(recipe)
    process = nonet("run", str(recipe), start=True)
    wait_for(lambda: list((workspace / "store" / "corpus").rglob("state.json")))
    time.sleep(0.5)
    os.kill(int(only(workspace, "pid").read_text()), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "the worker of stage corpus was killed (SIGKILL" in errors
    assert len(errors.splitlines()) == 1
    assert "unfinished: goes on with attempt 1" in nonet("plan", str(recipe)).stdout

    run()
    folder = only(workspace, "starts").parent
    assert folder.name == "1"
    assert (folder / "starts").read_text() == "2"
    assert (folder / "output" / "result.txt").read_text() == slow_hash
    assert prefect_states(workspace) == ["Failed"]


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_goes_on(
    recipe: Path, workspace: Path, nonet: Command, slow_hash: str
) -> None:
    slow(recipe, function="make_with_a_child")
    process = nonet("run", str(recipe), start=True)
    wait_for(lambda: list((workspace / "store" / "corpus").rglob("state.json")))
    pids = [int(only(workspace, name).read_text()) for name in ("pid", "child_pid")]
    server = int(subprocess.check_output(["pgrep", "-P", str(process.pid), "-f", "flows.server"], text=True))
    process.kill()
    process.communicate()
    wait_for(lambda: not any(is_alive(pid) for pid in [*pids, server]), seconds=5)

    assert nonet("run", str(recipe)).returncode == 0
    folder = only(workspace, "starts").parent
    assert (folder / "output" / "result.txt").read_text() == slow_hash
    assert not is_alive(int((folder / "child_pid").read_text()))
    assert prefect_states(workspace) == ["Crashed", "Completed"]


@pytest.mark.slow
def test_of_two_runs_one_wins_and_ctrl_c_ends_it_cleanly(recipe: Path, workspace: Path, nonet: Command) -> None:
    slow(recipe)
    first = nonet("run", str(recipe), start=True, start_new_session=True)
    wait_for(lambda: list((workspace / "store" / "corpus").rglob("state.json")))
    second = nonet("run", str(recipe))
    assert second.returncode == 3
    assert f"is held by process {first.pid} on" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert f"running: process {first.pid}" in nonet("status").stdout

    worker = int(only(workspace, "pid").read_text())
    os.killpg(first.pid, signal.SIGINT)
    output, errors = first.communicate(timeout=60)
    assert first.returncode == 130
    assert not is_alive(worker)
    assert "stopping: finished stages are kept" in output
    assert len(errors.splitlines()) == 1
    assert json.loads((workspace / "last.json").read_text())["state"] == "interrupted"
    assert prefect_states(workspace) == ["Cancelled"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["run", "RECIPE", "--set", "expert.lr=1"], 2, "unknown key expert.lr; did you mean expert.optimizer.lr?"),
        (["plan", "none.toml"], 2, "cannot read the recipe none.toml"),
        (["run"], 2, "Missing argument 'RECIPE'"),
        (["rerun", "coding/high"], 2, "there is no workspace at"),
        (["status"], 2, "there is no workspace at"),
        (["lineage", "export"], 2, "there is no workspace at"),
        (["run", "RECIPE", "--set", "functions.corpus=nowhere:f"], 2, "there is no module nowhere"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(
    recipe: Path, workspace: Path, nonet: Command, arguments: list[str], code: int, text: str
) -> None:
    result = nonet(*[str(recipe) if argument == "RECIPE" else argument for argument in arguments])
    assert result.returncode == code
    assert text in result.stderr
    assert result.stderr.startswith("nonet: ")
    assert len(result.stderr.splitlines()) == 1
    assert not workspace.exists()


def test_looking_is_fast_and_says_what_is_there(recipe: Path, finished: Path, nonet: Command) -> None:
    with spends_at_most(seconds=1):
        plan = nonet("plan", str(recipe), "--set", "distill.optimizer.lr=0.5", "--json")
    assert plan.returncode == 1
    rows = {row["stage"]: row for row in json.loads(plan.stdout)}
    assert rows["distill"]["changes"] == [{"key": "optimizer.lr", "old": 0.001, "new": 0.5}]
    assert rows["distill"]["status"] == "run"
    assert rows["expert/coding/high"]["status"] == "cached"
    assert nonet("plan", str(recipe)).returncode == 0

    lineage = json.loads(nonet("lineage", "--json").stdout)
    assert lineage[0]["stage"] == "export"
    assert len({row["stage"] for row in lineage}) == len(lineage) == 12
    assert "expert/coding/high" in nonet("lineage").stdout
    assert nonet("lineage", "--mermaid").stdout.startswith("flowchart LR")
    assert "mlflow ui --backend-store-uri sqlite:" in nonet("ui").stdout


def test_a_full_disk_is_named(recipe: Path, workspace: Path, nonet: Command) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    result = nonet("run", str(recipe), preexec_fn=no_room)
    assert result.returncode == 5
    assert result.stderr.startswith("nonet: disk full: ")
    assert len(result.stderr.splitlines()) == 1
