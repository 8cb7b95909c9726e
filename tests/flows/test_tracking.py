"""MLflow's copy of a run: complete, linked, never twice, and never in the way of the run."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun

from flows.session import open_session
from flows.specs import StageResult
from flows.store import Store
from flows.tracking import MARKER

Run = Callable[..., dict[str, StageResult]]


def run_again(recipe: Path, workspace: Path) -> None:
    """A run with nothing to do."""
    with open_session(str(recipe), str(workspace), silent=True) as session:
        session.adopt()


def client_of(workspace: Path) -> MlflowClient:
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    uri = f"sqlite:///{workspace / 'mlflow.db'}"
    return MlflowClient(uri, registry_uri=uri)


def runs_of(workspace: Path) -> dict[str, list[MlflowRun]]:
    """All runs by name."""
    client = client_of(workspace)
    found: dict[str, list[MlflowRun]] = {}
    for run in client.search_runs([client.get_experiment_by_name("fake").experiment_id], max_results=1000):
        found.setdefault(run.data.tags["mlflow.runName"], []).append(run)
    return found


def test_each_stage_is_a_run_under_the_pipelines(finished: Path) -> None:
    runs = runs_of(finished)
    parent = runs.pop("fake run")[0]
    assert len(runs) == 18
    assert all(len(found) == 1 for found in runs.values())
    assert {found[0].data.tags["mlflow.parentRunId"] for found in runs.values()} == {parent.info.run_id}
    assert {found[0].info.status for found in runs.values()} | {parent.info.status} == {"FINISHED"}
    expert = runs["expert/coding/high"][0]
    assert expert.data.params["optimizer.lr"] == "0.001"
    assert expert.data.params["domain"] == "coding"
    history = client_of(finished).get_metric_history(expert.info.run_id, "loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [
        (step, 1 / step, 1_700_000_000_000 + 1000 * step) for step in (1, 2, 3)
    ]
    assert expert.data.metrics["kl_k"] == 0.5
    assert expert.data.metrics["final/loss"] == pytest.approx(1 / 3)


def test_lineage_edges_data_sets_and_registered_versions(finished: Path) -> None:
    client = client_of(finished)
    runs = {name: client.get_run(found[0].info.run_id) for name, found in runs_of(finished).items()}

    def made(stage: str) -> str:
        outputs = runs[stage].outputs.model_outputs
        assert len(outputs) == 1
        return outputs[0].model_id

    def used(stage: str) -> set[str]:
        return {m.model_id for m in runs[stage].inputs.model_inputs}

    experts = [f"expert/{domain}/{effort}" for domain in ("coding", "general") for effort in ("low", "high")]
    assert used("distill") == {made("midtrain"), *(made(expert) for expert in experts)}
    assert used("expert/coding/low") == {made("midtrain")}
    assert used("evaluate/student") == {made("distill")}
    assert used("export") == {made("distill")}
    data = {d.dataset.name: d.tags[0].value for d in runs["expert/coding/low"].inputs.dataset_inputs}
    assert data == {"tasks/coding": "rl-train"}

    model = client.get_logged_model(made("export"))
    record = next(r for r in Store(finished / "store").results("export"))
    assert model.tags["content_hash"] == record.result_id
    for name in ("fake-student", "fake-expert-coding-high", "fake-expert-general-low"):
        version = client.get_model_version_by_alias(name, "candidate")
        assert int(version.version) == 1
    assert client.get_model_version_by_alias("fake-student", "candidate").run_id == runs["export"].info.run_id
    scored = client.get_logged_model(made("distill")).metrics
    assert [m.key for m in scored] == ["loss"]


def test_sending_again_makes_no_second_copy(recipe: Path, finished: Path) -> None:
    before = {name: len(found) for name, found in runs_of(finished).items()}
    for marker in (finished / "store").rglob(MARKER):
        marker.unlink()
    run_again(recipe, finished)
    after = runs_of(finished)
    assert {name: len(found) for name, found in after.items() if name != "fake run"} == {
        name: num for name, num in before.items() if name != "fake run"
    }
    run_id = after["expert/coding/high"][0].info.run_id
    assert len(client_of(finished).get_metric_history(run_id, "loss")) == 3
    assert len(client_of(finished).search_model_versions("name='fake-student'")) == 1
    assert len(list((finished / "store").rglob(MARKER))) == 18


def test_a_dead_tracking_server_does_not_stop_a_run_and_gets_the_backlog(
    run: Run, recipe: Path, finished: Path
) -> None:
    (finished / "mlflow.db").rename(finished / "away.db")
    (finished / "mlflow.db").mkdir()
    results = run(force=["expert/coding/high"])
    marker = results["expert/coding/high"].folder / MARKER
    assert results["expert/coding/high"].attempt == 2
    assert not marker.exists()
    (finished / "mlflow.db").rmdir()
    (finished / "away.db").rename(finished / "mlflow.db")
    run_again(recipe, finished)
    run_id = json.loads(marker.read_text())["run_id"]
    runs = runs_of(finished)["expert/coding/high"]
    assert {r.data.tags["nonet.attempt"] for r in runs} == {"1", "2"}
    assert run_id in {r.info.run_id for r in runs}
    version = client_of(finished).get_model_version_by_alias("fake-expert-coding-high", "candidate")
    assert int(version.version) == 1
