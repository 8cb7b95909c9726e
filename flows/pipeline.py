"""The pipeline as a Prefect flow. Prefect is imported here: enter ``flows.orchestrator.orchestrator`` first.

corpus ─► midtrain ─► budget ─┬─► expert coding/max …   ─┬─► distill ─► evaluate ─► export
                              ├─► expert research/max … ─┤                 └──► report
                              └─► expert general/max …  ─┘
"""

from collections.abc import Callable, Sequence
from typing import Any

from prefect import flow, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.states import Cancelled, Crashed, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flows.errors import InterruptedRunError
from flows.schedule import Started
from flows.session import Session, open_session
from flows.specs import StageResult, StageSpec
from flows.stages import Inputs, Shop, run_stage


@flow(name="nonet", task_runner=ThreadPoolTaskRunner(), persist_result=False, validate_parameters=True)
def pipeline(
    recipe: str,
    workspace: str = "workspace",
    overrides: Sequence[str] = (),
    force: Sequence[str] = (),
    silent: bool = False,
) -> Any:
    """Runs every stage of the recipe file that has no result yet or is named in ``force``; returns result ids by stage.

    Stages start in the order written here as soon as their inputs are there and a slot is free.
    """
    try:
        with open_session(recipe, workspace, overrides, force, silent=silent) as session:
            _close_abandoned_runs(session)
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
            return {name: result.result_id for name, result in stage.run().items()}
    except InterruptedRunError as error:
        return Cancelled(message=str(error))


@task(cache_policy=NO_CACHE, persist_result=False)
def run_one(shop: Shop, spec: StageSpec, inputs: Inputs) -> StageResult:
    """A stage as a Prefect task: only its small record passes through Prefect, never a weight."""
    return run_stage(shop, spec, inputs)


def run_pipeline(workspace_tag: str, **parameters: Any) -> dict[str, str]:
    """Calls the flow in this process. Raises what stopped it: StageFailedError, InterruptedRunError, ValueError, ..."""
    with tags(workspace_tag):
        state: State[Any] = pipeline(**parameters, return_state=True)
    if state.is_cancelled():
        raise InterruptedRunError(state.message or "interrupted")
    result = state.result(raise_on_failure=True)
    assert isinstance(result, dict)
    return result


def _submit_to_prefect(shop: Shop) -> Callable[[StageSpec, Inputs], Started]:
    futures: dict[str, Any] = {}

    def start(spec: StageSpec, inputs: Inputs) -> Started:
        named = run_one.with_options(task_run_name=spec.name, tags={spec.kind, *spec.name.split("/")[1:]})
        upstream = [futures[name] for name in spec.inputs.values() if name in futures]
        future: Started = named.submit(quote(shop), quote(spec), quote(inputs), wait_for=upstream)
        futures[spec.name] = future
        return future

    return start


def _close_abandoned_runs(session: Session) -> None:
    """Runs of this workspace that a killed process left as Running: only one may run, and that is this one."""
    from prefect.runtime import flow_run

    active = FlowRunFilter.model_validate(
        {
            "tags": {"all_": [session.workspace_tag]},
            "state": {"type": {"any_": ["RUNNING", "PENDING"]}},
            "id": {"not_any_": [flow_run.id]},
        }
    )
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=active):
            client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
