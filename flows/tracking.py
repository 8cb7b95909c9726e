"""MLflow's copy of the records: an outbox that sends each finished stage once, from a thread of the control plane.

The store is the truth. A marker beside the record says that MLflow has it; whatever has none is sent by the next run:
a server that was away gets the backlog later. Every step of sending can be repeated without a second copy.
"""

import contextlib
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.fingerprint import digest
from flows.recipe import Recipe
from flows.specs import StageResult
from flows.templates import adopt_template
from flows.workspace import Workspace, write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

MARKER = "mlflow.json"
_CLOSE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A result together with the results that it was made from, by role."""

    result: StageResult
    inputs: Mapping[str, StageResult]


class Tracker:
    """``submit`` returns at once; ``close`` waits for what is under way and ends the parent run.

    ``say`` gets one line when MLflow cannot be written; nothing here ever stops a run.
    """

    def __init__(self, workspace: Workspace, recipe: Recipe, origin: str, say: Callable[[str], None]) -> None:
        self._workspace = workspace
        self._recipe = recipe
        self._origin = origin
        self._say = say
        self._queue: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._started = time.time()
        self._status = "FINISHED"
        self._note = ""
        self._artifacts: dict[str, str] = {}
        self._thread = threading.Thread(target=self._work, name="nonet-tracking", daemon=True)

    def submit(self, finished: Finished) -> None:
        """The first one starts the thread, and with it MLflow."""
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put(finished)

    def close(self, status: str, artifacts: Mapping[str, str], note: str) -> None:
        """``status`` is MLflow's (FINISHED, FAILED, KILLED).

        ``artifacts`` are texts for the parent run by file name, ``note`` (markdown) is shown on top of it.
        """
        self._status = status
        self._note = note
        self._artifacts = dict(artifacts)
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        failed: BaseException | None = None
        client, experiment_id, parent_id = None, "", ""
        with contextlib.suppress(Exception):
            _quiet()
        try:
            client, experiment_id = connect(self._workspace, self._recipe.name)
            parent_id = self._open_parent(client, experiment_id)
        except Exception as error:
            failed = error
        while (finished := self._queue.get()) is not None:
            if client is None or failed is not None:
                continue
            try:
                send(client, experiment_id, parent_id, self._recipe, finished)
            except Exception as error:
                failed = error
        try:
            if client is not None and parent_id:
                self._close_parent(client, parent_id)
        except Exception as error:
            failed = failed or error
        if failed is not None:
            line = " ".join(str(failed).split())[:200]
            self._say(f"MLflow was not written ({type(failed).__name__}: {line}); the next run sends what is missing")

    def _open_parent(self, client: "MlflowClient", experiment_id: str) -> str:
        """The parent run: the one of the last run of this recipe if that did not finish, else a new one."""
        identity = digest(self._recipe.model_dump(mode="json"))
        path = self._workspace.root / "mlflow-run.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            last = json.loads(path.read_text())
            if last["recipe"] == identity and not last["finished"] and _run_exists(client, last["run_id"]):
                client.update_run(last["run_id"], status="RUNNING")
                return str(last["run_id"])
        tags = {
            "mlflow.runName": f"{self._recipe.name} {self._origin}",
            "mlflow.source.name": "nonet",
            "nonet.recipe": self._recipe.name,
            "nonet.origin": self._origin,
            "nonet.workspace": str(self._workspace.root),
        }
        started = int(self._started * 1000)
        run_id: str = client.create_run(experiment_id, start_time=started, tags=tags).info.run_id
        client.log_dict(run_id, self._recipe.model_dump(mode="json"), "recipe.json")
        write_json(path, {"recipe": identity, "run_id": run_id, "finished": False})
        return run_id

    def _close_parent(self, client: "MlflowClient", parent_id: str) -> None:
        for name, text in self._artifacts.items():
            client.log_text(parent_id, text, name)
        if self._note:
            client.set_tag(parent_id, "mlflow.note.content", self._note)
        client.set_terminated(parent_id, self._status)
        path = self._workspace.root / "mlflow-run.json"
        write_json(path, json.loads(path.read_text()) | {"finished": self._status == "FINISHED"})


def is_tracked(workspace: Workspace, result: StageResult) -> bool:
    """Whether MLflow has this result already."""
    return (result.folder / MARKER).exists() and (workspace.root / "mlflow.db").exists()


def connect(workspace: Workspace, experiment: str) -> tuple["MlflowClient", str]:
    """A client on the workspace's database, and the id of the experiment, made where it is missing."""
    _quiet()
    import mlflow
    from mlflow import MlflowClient

    adopt_template("mlflow", workspace.root / "mlflow.db")
    with contextlib.closing(sqlite3.connect(workspace.root / "mlflow.db")) as connection:
        connection.execute("PRAGMA user_version")  # MLflow itself would try a broken database for minutes
    mlflow.set_tracking_uri(workspace.mlflow_uri)
    client = MlflowClient(workspace.mlflow_uri, registry_uri=workspace.mlflow_uri)
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        return client, found.experiment_id
    tags = {"mlflow.experimentKind": "custom_model_development"}
    return client, client.create_experiment(experiment, workspace.artifacts_path.as_uri(), tags)


def send(client: "MlflowClient", experiment_id: str, parent_id: str, recipe: Recipe, finished: Finished) -> None:
    """One stage as a child run, unless its marker is there. Raises whatever MLflow raises."""
    from flows.mlflow_run import write_run

    marker = finished.result.folder / MARKER
    if marker.exists() and _run_exists(client, json.loads(marker.read_text())["run_id"]):
        return
    models = {role: _model_id(result) for role, result in finished.inputs.items()}
    row = write_run(client, experiment_id, parent_id, recipe, finished, {r: m for r, m in models.items() if m})
    write_json(marker, row)


def _model_id(result: StageResult) -> str | None:
    marker = result.folder / MARKER
    model_id: str | None = json.loads(marker.read_text())["model_id"] if marker.exists() else None
    return model_id


def _run_exists(client: "MlflowClient", run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException:
        return False
    return True


def _quiet() -> None:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
