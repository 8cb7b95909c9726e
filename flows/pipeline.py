"""The pipeline as a Prefect flow. Prefect is imported here: enter ``flows.orchestrator.orchestrator`` first.

corpus ─► midtrain ─► budget ─┬─► expert coding/max …   ─┬─► distill ─► evaluate ─► export
                              ├─► expert research/max … ─┤                 └──► report
                              └─► expert general/max …  ─┘
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flows.errors import InterruptedRunError
from flows.lineage import ancestors, lineage_mermaid
from flows.progress import figures, format_s
from flows.schedule import Started
from flows.session import Session, open_session
from flows.specs import StageResult, StageSpec
from flows.stages import Inputs, Shop, run_stage
from flows.summary import matrix_rows

_RUNNER: Any = ThreadPoolTaskRunner()  # the schedule sees to the slots


def _run_name() -> str:
    parameters = flow_run.parameters
    return f"{Path(parameters['recipe']).stem} {parameters['origin']}"


@flow(name="nonet", flow_run_name=_run_name, task_runner=_RUNNER, persist_result=False, validate_parameters=True)
def pipeline(
    recipe: str,
    workspace: str = "workspace",
    overrides: Sequence[str] = (),
    force: Sequence[str] = (),
    origin: str = "run",
    silent: bool = False,
) -> Any:
    """Runs every stage of the recipe file that has no result yet or is named in ``force``; returns folders by stage.

    Stages start in the order written here as soon as their inputs are there and a slot is free.
    """
    try:
        with open_session(recipe, workspace, overrides, force, origin, silent=silent) as session:
            _close_abandoned_runs(workspace)
            stage = session.schedule(_submit_to_prefect(session.shop))
            for domain in session.recipe.domains:
                stage(f"tasks/{domain}")
            stage("corpus")
            stage("midtrain")
            stage("budget")
            for cell in session.cells:
                stage(f"expert/{cell}")
            stage("distill")
            stage("evaluate/student")
            stage("export")
            stage("evaluate/base")
            for cell in session.cells:
                stage(f"evaluate/{cell}")
            stage("report")
            results = stage.run()
            _publish(session, results)
            return {name: str(result.folder) for name, result in results.items()}
    except InterruptedRunError as error:
        return Cancelled(message=str(error))


@task(cache_policy=NO_CACHE, persist_result=False)
def run_one(shop: Shop, spec: StageSpec, inputs: Inputs) -> StageResult:
    """A stage as a Prefect task: only its small record passes through Prefect, never a weight."""
    result = run_stage(shop, spec, inputs)
    get_run_logger().info("%s  %s  %s", format_s(result.duration_s), figures(result), result.folder)
    return result


def run_pipeline(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Calls the flow in this process. Raises what stopped it: StageFailedError, InterruptedRunError, ValueError, ..."""
    call: Callable[..., Any] = pipeline
    state: State[Any] = call(**parameters, return_state=True)
    if state.is_cancelled():
        raise InterruptedRunError(state.message or "interrupted")
    result = state.result(raise_on_failure=True)
    assert isinstance(result, dict)
    return result


def serve_pipeline() -> None:
    """Runs what the server schedules for this deployment, one at a time, until it is interrupted."""
    served: Any = pipeline
    served.serve(name="pipeline", limit=1)


def _submit_to_prefect(shop: Shop) -> Callable[[StageSpec, Inputs], Started]:
    futures: dict[str, Any] = {}

    def start(spec: StageSpec, inputs: Inputs) -> Started:
        named: Any = run_one.with_options(task_run_name=spec.name)
        upstream = [futures[name] for name in spec.inputs.values() if name in futures]
        future: Started = named.submit(quote(shop), quote(spec), quote(inputs), wait_for=upstream)
        futures[spec.name] = future
        return future

    return start


def _publish(session: Session, results: Mapping[str, StageResult]) -> None:
    """Prefect artifacts with stable keys: the matrix, and the student's lineage."""
    if rows := matrix_rows(results):
        create_table_artifact(
            key="matrix", table=[_flat(row) for row in rows], description=f"{session.recipe.name}: accuracy per cell"
        )
    nodes = ancestors(session.shop.store, results["export"])
    create_markdown_artifact(key="lineage", markdown=f"```mermaid\n{lineage_mermaid(nodes)}\n```")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("base", "expert", "student")
    return {"cell": row["cell"], **{name: row[name]["sampled"] for name in names}, "recovery": row["recovery"]}


def _close_abandoned_runs(workspace: str) -> None:
    """Runs of this workspace that a killed process left as Running: only one may run, and that is this one."""
    active = FlowRunFilter.model_validate(
        {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}, "id": {"not_any_": [flow_run.id]}}
    )
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=active):
            if run.parameters.get("workspace") == workspace:
                client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
