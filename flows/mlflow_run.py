"""One finished stage as an MLflow run: parameters, metrics by step, data sets, models by reference, lineage edges."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlflow import create_external_model
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
)
from mlflow.exceptions import MlflowException

from flows.plan import flatten
from flows.recipe import Recipe
from flows.specs import KINDS, StageResult

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from flows.tracking import Finished

_MAX_PARAMS, _MAX_METRICS, _MAX_VALUE = 100, 1000, 500
_CONTEXTS = {"midtrain": "midtrain", "budget": "budget", "expert": "rl-train", "distill": "distill", "evaluate": "eval"}
_ALIAS = "candidate"


def write_run(
    client: "MlflowClient",
    experiment_id: str,
    parent_id: str,
    recipe: Recipe,
    finished: "Finished",
    models: Mapping[str, str],
) -> dict[str, str | None]:
    """Writes the run and returns the marker: its run id, and the id and version of the model that it made, if any.

    ``models`` maps a role to the MLflow id of the model that fills it. Sending the same stage twice changes nothing.
    """
    result = finished.result
    run_id = _open_run(client, experiment_id, parent_id, result)
    params = [Param(k[:250], _short(v)) for k, v in flatten(result.config)]
    for start in range(0, len(params), _MAX_PARAMS):
        client.log_batch(run_id, params=params[start : start + _MAX_PARAMS])
    inputs = list(dict.fromkeys(models.values()))
    client.log_inputs(run_id, datasets=_datasets(finished), models=[LoggedModelInput(m) for m in inputs] or None)
    evaluated = models.get("model") if result.kind == "evaluate" else None
    rows = [*_metric_rows(result), *_summary(finished, evaluated)]
    for start in range(0, len(rows), _MAX_METRICS):
        client.log_batch(run_id, metrics=rows[start : start + _MAX_METRICS])
    client.log_dict(run_id, dict(result.config), "config.json")
    client.log_artifact(run_id, str(result.folder / "record.json"))
    for name in ("report.html", "cells.json"):
        if (result.output_path / name).exists():
            client.log_artifact(run_id, str(result.output_path / name))
    model_id, version = None, None
    if KINDS[result.kind].makes_model:
        model_id = _log_model(client, experiment_id, run_id, result)
        version = _register(client, run_id, model_id, recipe, result)
    client.set_terminated(run_id, "FINISHED", end_time=_ms(result.created))
    return {"run_id": run_id, "model_id": model_id, "version": version}


def _open_run(client: "MlflowClient", experiment_id: str, parent_id: str, result: StageResult) -> str:
    """The run of this attempt: one that an interrupted sending left behind, or a new one."""
    left = client.search_runs([experiment_id], f"tags.`nonet.key` = '{result.key}'", max_results=1)
    if left:
        found: str = left[0].info.run_id
        return found
    tags = {
        "mlflow.runName": result.stage,
        "mlflow.parentRunId": parent_id,
        "mlflow.source.name": result.function,
        "mlflow.source.git.commit": result.git_commit,
        "nonet.key": result.key,
        "nonet.kind": result.kind,
        "nonet.attempt": str(result.attempt),
        "nonet.result_id": result.result_id,
        "nonet.fingerprint": result.fingerprint,
        "nonet.folder": str(result.folder),
    }
    run_id: str = client.create_run(experiment_id, start_time=_ms(result.started), tags=tags).info.run_id
    return run_id


def _metric_rows(result: StageResult) -> Iterator[Metric]:
    """Every line of the stage's metrics file; ``time_s`` is Unix time. A half-written last line is left out."""
    path = result.folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return
        step, time_s = int(row.pop("step")), float(row.pop("time_s"))
        for name, value in row.items():
            if math.isfinite(value):
                yield Metric(_metric_name(name), float(value), _ms(time_s), step)


def _summary(finished: "Finished", evaluated: str | None) -> Iterator[Metric]:
    """The stage's own summary. Only an evaluation's is linked to its model: a linked model counts as an input."""
    result = finished.result
    tasks = next((made for role, made in finished.inputs.items() if role.startswith("tasks/")), None)
    linked: dict[str, Any] = {}
    if evaluated is not None and tasks is not None:
        linked = {"model_id": evaluated, "dataset_name": tasks.stage, "dataset_digest": tasks.result_id[:12]}
    for name, value in result.metrics.items():
        if math.isfinite(value):
            key = _metric_name(name if evaluated else f"final/{name}")
            yield Metric(key, float(value), _ms(result.created), 0, **linked)


def _datasets(finished: "Finished") -> list[DatasetInput]:
    context = _CONTEXTS.get(finished.result.kind)
    made = {r.stage: r for r in finished.inputs.values() if r.kind in ("tasks", "corpus")} if context else {}
    return [
        DatasetInput(
            Dataset(
                name=stage,
                digest=result.result_id[:12],
                source_type="local",
                source=json.dumps({"uri": result.output_path.as_uri()}),
                profile=json.dumps(dict(result.metrics)),
            ),
            [InputTag("mlflow.data.context", str(context))],
        )
        for stage, result in made.items()
    ]


def _log_model(client: "MlflowClient", experiment_id: str, run_id: str, result: StageResult) -> str:
    """The stage's model by reference: its folder and content hash, no upload."""
    outputs = client.get_run(run_id).outputs
    if outputs is not None and outputs.model_outputs:
        found: str = outputs.model_outputs[0].model_id
        return found
    model = create_external_model(
        name=result.stage.replace("/", "-"),
        source_run_id=run_id,
        tags={
            "checkpoint_uri": result.output_path.as_uri(),
            "content_hash": result.result_id,
            "stage_key": result.key,
        },
        model_type=result.kind,
        experiment_id=experiment_id,
    )
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    model_id: str = model.model_id
    return model_id


def _register(client: "MlflowClient", run_id: str, model_id: str, recipe: Recipe, result: StageResult) -> str | None:
    """A version for each expert and for the exported student; the same content is the same version."""
    if result.kind not in ("expert", "export"):
        return None
    name = f"{recipe.name}-student" if result.kind == "export" else f"{recipe.name}-{result.stage.replace('/', '-')}"
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    known = [v for v in client.search_model_versions(f"name='{name}'") if v.tags.get("result_id") == result.result_id]
    if not known:
        tags = {"result_id": result.result_id, "stage_key": result.key}
        source = f"models:/{model_id}"
        known = [client.create_model_version(name, source, run_id, tags=tags, model_id=model_id)]
    version = str(known[0].version)
    client.set_registered_model_alias(name, _ALIAS, version)
    return version


def _metric_name(name: str) -> str:
    """MLflow takes letters, digits and ``_ - . space : /``."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
