"""The command line: ``nonet plan | run | rerun | status | lineage | ui``. One-line errors, exit codes, --json."""

import contextlib
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from flows.code_version import source_digest
from flows.errors import (
    STALE,
    UNEXPECTED,
    USER_ERROR,
    DiskFullError,
    FlowError,
    InterruptedRunError,
    OrchestratorError,
    is_disk_full,
)
from flows.graph import build_graph, descendants, find_stage
from flows.lineage import ancestors, lineage_mermaid, lineage_rows, lineage_text
from flows.lock import holder
from flows.plan import StagePlan, check_functions, make_plan
from flows.recipe import Recipe, load_recipe
from flows.session import Session, open_session
from flows.show import places_text, plan_rows, plan_text, status_text, to_json
from flows.specs import StageResult
from flows.store import Store
from flows.summary import matrix_rows, matrix_text, places, ui_commands
from flows.workspace import Workspace, open_workspace, peek_workspace

_NO_ROOM_BYTES = 1 << 20  # a server that meets a full disk only says that it failed
_workspace = click.option(
    "--workspace", "-w", default="workspace", show_default=True, help="Folder of the stage store."
)
_set = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe.")
_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nonet")
def cli() -> None:
    """From one recipe: a base model, one expert per (domain, effort), and one student that holds what they learned.

    Exit codes: 0 done, 1 something to do (plan), 2 wrong input, 3 workspace held, 4 a stage failed, 5 disk full,
    6 Prefect server failed, 130 interrupted.
    """


@cli.command()
@click.argument("recipe")
@_workspace
@_set
@_json
def plan(recipe: str, workspace: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what `run` would do, and why. Exit code 1 when something is to be done."""
    loaded = load_recipe(Path(recipe), overrides)
    plans = _plan(loaded, peek_workspace(Path(workspace)))
    click.echo(to_json(plan_rows(plans)) if as_json else plan_text(plans, loaded.resources.num_slots))
    if any(p.status != "cached" for p in plans.values()):
        sys.exit(STALE)


@cli.command()
@click.argument("recipe")
@_workspace
@_set
@_json
def run(recipe: str, workspace: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run every stage that has no result yet."""
    _run(recipe, workspace, overrides, force=(), origin="run", as_json=as_json)


@cli.command()
@click.argument("stage")
@click.option("--only", is_flag=True, help="Not what descends from it.")
@click.option("--recipe", help="Default: the recipe that ran last in the workspace, with its overrides.")
@_workspace
@_set
@_json
def rerun(
    stage: str, only: bool, recipe: str | None, workspace: str, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Run a finished stage again, and what descends from it. STAGE may be short: coding/high is expert/coding/high."""
    place = open_workspace(Path(workspace), create=False)
    if recipe is None:
        last = place.read_last()
        if last is None:
            raise ValueError(f"nothing has run in {place.root} yet; name a recipe with --recipe")
        recipe, overrides = last["recipe"], (*last["overrides"], *overrides)
    graph = build_graph(load_recipe(Path(recipe), overrides))
    name = find_stage(graph, stage)
    force = {name} if only else descendants(graph, name)
    _run(recipe, workspace, overrides, force=sorted(force), origin=f"rerun {name}", as_json=as_json)


@cli.command()
@_workspace
@_json
def status(workspace: str, as_json: bool) -> None:
    """Show who holds the workspace, how the last run ended and what every stage of its recipe came to."""
    place, recipe = _last_recipe(workspace)
    owner, last = holder(place.root), place.read_last() or {}
    plans = _plan(recipe, place)
    results = _results(plans)
    if as_json:
        running = owner.describe() if owner else None
        row = {"workspace": str(place.root), "held_by": running, "last": last, "stages": plan_rows(plans)}
        click.echo(to_json(row | {"matrix": matrix_rows(results), "places": places(place, results)}))
        return
    state = f"running: {owner.describe()}" if owner else f"last run: {last.get('state', 'none')}"
    click.echo(f"{place.root}  {recipe.name}  {state}")
    click.echo(status_text(plans))
    click.echo(places_text(places(place, results)))


@cli.command()
@click.argument("stage", default="export")
@click.option("--mermaid", is_flag=True, help="As a mermaid flowchart.")
@_workspace
@_json
def lineage(stage: str, mermaid: bool, workspace: str, as_json: bool) -> None:
    """Show what a stage's newest result was made from, back to the data. Default: the exported student."""
    place, recipe = _last_recipe(workspace)
    store = Store(place.store_path)
    name = find_stage(build_graph(recipe), stage)
    made = store.results(name)
    if not made:
        raise ValueError(f"{name} has no result in {place.root} yet; `nonet run` makes it")
    nodes = ancestors(store, made[-1])
    click.echo(to_json(lineage_rows(nodes)) if as_json else lineage_mermaid(nodes) if mermaid else lineage_text(nodes))


@cli.command()
@_workspace
@_json
def ui(workspace: str, as_json: bool) -> None:
    """Print the commands that open MLflow's and Prefect's own user interfaces on a workspace."""
    commands = ui_commands(open_workspace(Path(workspace), create=False))
    click.echo(to_json(commands) if as_json else places_text(commands))


@cli.command()
def serve() -> None:
    """Run what the Prefect server at PREFECT_API_URL schedules for the deployment nonet/pipeline."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ValueError(
            "PREFECT_API_URL is not set; start `prefect server start`, then set it to http://127.0.0.1:4200/api"
        )
    from flows.pipeline import serve_pipeline

    serve_pipeline()


def _run(
    recipe: str, workspace: str, overrides: Sequence[str], force: Sequence[str], origin: str, *, as_json: bool
) -> None:
    parameters: dict[str, Any] = {
        "recipe": str(Path(recipe).absolute()),
        "workspace": str(Path(workspace).absolute()),
        "overrides": list(overrides),
        "force": list(force),
        "origin": origin,
        "silent": as_json,
    }
    with open_session(**parameters) as session:
        if session.is_complete:
            session.adopt()
        else:
            _run_flow(session, parameters)
    results = session.results
    where = places(session.workspace, results)
    if as_json:
        click.echo(to_json({"ran": session.ran, "matrix": matrix_rows(results), "places": where}))
        return
    if not session.ran:
        click.echo("nothing to do: every stage has its result")
    elif table := matrix_text(matrix_rows(results)):
        click.echo(f"\n{table}\n")
    click.echo(places_text(where))


def _run_flow(session: Session, parameters: dict[str, Any]) -> None:
    from flows.orchestrator import orchestrator

    children, root = session.shop.children, session.workspace.root
    children.warm_up()
    try:
        with orchestrator(session.workspace, children.stopping):
            from flows.pipeline import run_pipeline

            run_pipeline(parameters)
    except Exception as error:
        if is_disk_full(error) or shutil.disk_usage(root).free < _NO_ROOM_BYTES:
            raise DiskFullError(f"disk full under {root}; free some space and run again") from error
        if type(error).__module__.partition(".")[0] in ("prefect", "httpx"):
            log = session.workspace.prefect_path / "server.log"
            raise OrchestratorError(f"Prefect failed ({type(error).__name__}); its server's log: {log}") from error
        raise


def _plan(recipe: Recipe, place: Workspace) -> dict[str, StagePlan]:
    check_functions(recipe)
    return make_plan(build_graph(recipe), Store(place.store_path), recipe.name, source_digest())


def _last_recipe(workspace: str) -> tuple[Workspace, Recipe]:
    """The workspace and the resolved recipe that ran last in it."""
    place = open_workspace(Path(workspace), create=False)
    path = place.root / "recipe.json"
    if not path.exists():
        raise ValueError(f"nothing has run in {place.root} yet; `nonet run RECIPE --workspace {workspace}` does")
    return place, Recipe.model_validate_json(path.read_text())


def _results(plans: dict[str, StagePlan]) -> dict[str, StageResult]:
    return {name: p.result for name, p in plans.items() if p.result is not None}


def main() -> None:
    """Every error is one line on stderr and an exit code; what was not foreseen leaves its traceback in a file."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), USER_ERROR)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; run again: finished stages are kept", InterruptedRunError.exit_code)
    except FlowError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:
        if is_disk_full(error):
            _fail(f"disk full: {error}; free some space and run again", DiskFullError.exit_code)
        if isinstance(error, ValueError):
            _fail(" ".join(str(error).split()), USER_ERROR)
        if isinstance(error, (NotADirectoryError, PermissionError)) and error.filename:
            _fail(f"cannot use {error.filename}: {error.strerror}; name another path", USER_ERROR)
        path = Path(tempfile.gettempdir()) / f"nonet-error-{os.getpid()}.txt"
        with contextlib.suppress(OSError):
            path.write_text(traceback.format_exc())
        _fail(f"unexpected {type(error).__name__}: {error}; please report it with {path}", UNEXPECTED)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"nonet: {message}", err=True)
    sys.exit(code)
