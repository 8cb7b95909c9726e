"""The command line: ``nonet plan | run | rerun | status | lineage | ui``. One-line errors, exit codes, --json."""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flows.code_version import source_digest
from flows.errors import STALE, UNEXPECTED, USER_ERROR, DiskFullError, FlowError, InterruptedRunError, is_disk_full
from flows.graph import build_graph, descendants, find_stage
from flows.lock import hold
from flows.plan import StagePlan, check_functions, make_plan
from flows.progress import format_s
from flows.recipe import Recipe, load_recipe
from flows.session import workspace_tag
from flows.store import Store
from flows.workspace import Workspace, open_workspace, peek_workspace

Command = Callable[..., None]
_workspace = click.option(
    "--workspace", "-w", default="workspace", show_default=True, help="Folder of the stage store."
)
_set = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe.")
_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """From one recipe: a base model, one expert per (domain, effort), and one student that holds what they learned."""


@cli.command()
@click.argument("recipe")
@_workspace
@_set
@_json
def plan(recipe: str, workspace: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what `run` would do, and why. Exit code 1 when something is to be done."""
    plans = _plan(load_recipe(Path(recipe), overrides), peek_workspace(Path(workspace)))
    click.echo(json.dumps(_plan_rows(plans), indent=1) if as_json else _plan_text(plans))
    if any(p.status != "cached" for p in plans.values()):
        sys.exit(STALE)


@cli.command()
@click.argument("recipe")
@_workspace
@_set
@_json
def run(recipe: str, workspace: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run every stage that has no result yet."""
    _run(recipe, workspace, overrides, force=(), as_json=as_json)


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
    recipe, overrides = _last_recipe(place, recipe, overrides)
    graph = build_graph(load_recipe(Path(recipe), overrides))
    name = find_stage(graph, stage)
    _run(recipe, workspace, overrides, force=tuple({name} if only else descendants(graph, name)), as_json=as_json)


def _run(recipe: str, workspace: str, overrides: tuple[str, ...], force: tuple[str, ...], *, as_json: bool) -> None:
    place = open_workspace(Path(workspace), create=True)
    with hold(place.root):
        loaded = load_recipe(Path(recipe), overrides)
        plans = _plan(loaded, place, frozenset(force), check="full")
        if all(p.status == "cached" for p in plans.values()):
            click.echo(json.dumps({"ran": []}) if as_json else "nothing to do: every stage has its result")
            return
        from flows.orchestrator import orchestrator

        with orchestrator(place):
            from flows.pipeline import run_pipeline

            run_pipeline(
                workspace_tag(place),
                recipe=recipe,
                workspace=workspace,
                overrides=list(overrides),
                force=sorted(force),
                silent=as_json,
            )


def _plan(
    recipe: Recipe, workspace: Workspace, force: frozenset[str] = frozenset(), check: Any = "quick"
) -> dict[str, StagePlan]:
    check_functions(recipe)
    return make_plan(build_graph(recipe), Store(workspace.store_path), recipe.name, source_digest(), force)


def _plan_rows(plans: dict[str, StagePlan]) -> list[dict[str, Any]]:
    return [{"stage": n, "status": p.status, "reason": p.reason} for n, p in plans.items()]


def _plan_text(plans: dict[str, StagePlan]) -> str:
    width = max(len(name) for name in plans)
    return "\n".join(f"{p.status:<7}{n:<{width}}  {p.reason}".rstrip() for n, p in plans.items())


def _last_recipe(workspace: Workspace, recipe: str | None, overrides: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if recipe is not None:
        return recipe, overrides
    last = workspace.read_last()
    if last is None:
        raise ValueError(f"nothing has run in {workspace.root} yet; name a recipe with --recipe")
    return last["recipe"], (*last["overrides"], *overrides)


def main() -> None:
    """Every error is one line on stderr and an exit code; what was not foreseen leaves its traceback in a file."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(USER_ERROR)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; run again: finished stages are kept", InterruptedRunError.exit_code)
    except FlowError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:
        if is_disk_full(error):
            _fail(f"disk full: {error}; free some space and run again", DiskFullError.exit_code)
        if isinstance(error, ValueError):
            _fail(str(error), USER_ERROR)
        traceback.print_exc()
        _fail(f"unexpected {type(error).__name__}: {error}", UNEXPECTED)


def _fail(message: str, code: int) -> None:
    click.echo(f"nonet: {message}", err=True)
    sys.exit(code)
