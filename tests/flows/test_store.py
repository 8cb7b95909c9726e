"""Runs with real workers on the stage store: what runs again, what is kept, what a plan says about it."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.errors import DiskFullError, StageFailedError, WorkspaceHeldError
from flows.graph import build_graph
from flows.lock import hold
from flows.plan import StagePlan, check_functions, make_plan
from flows.recipe import load_recipe
from flows.specs import StageResult
from flows.stages import Shop, run_stage
from flows.store import Store, read_record
from flows.workspace import open_workspace, peek_workspace

Run = Callable[..., dict[str, StageResult]]


def plan(recipe: Path, workspace: Path, *overrides: str) -> dict[str, StagePlan]:
    loaded = load_recipe(recipe, overrides)
    return make_plan(build_graph(loaded), Store(workspace / "store"), loaded.name, "any")


def statuses(plans: dict[str, StagePlan]) -> dict[str, str]:
    return {name: p.status for name, p in plans.items() if p.status != "cached"}


@pytest.fixture
def shop(workspace: Path) -> Iterator[Shop]:
    with hold(open_workspace(workspace, create=True).root) as lease:
        shop = Shop.open(Store(workspace / "store"), lease, "fake")
        yield shop
        shop.children.kill()


def results(recipe: Path, workspace: Path) -> dict[str, StageResult]:
    return {name: p.result for name, p in plan(recipe, workspace).items() if p.result is not None}


def test_a_run_makes_every_stage_and_a_second_one_nothing(
    run: Run, recipe: Path, workspace: Path, finished_once: Path
) -> None:
    assert set(statuses(plan(recipe, workspace)).values()) == {"run", "waits"}
    shutil.copytree(finished_once, workspace)
    first = results(recipe, workspace)
    assert set(first) == set(build_graph(load_recipe(recipe)))
    assert run() == first


def test_a_changed_expert_makes_exactly_its_descendants_stale(recipe: Path, finished: Path) -> None:
    plans = plan(recipe, finished, "expert.cells.coding/high.optimizer.lr=5e-4")
    assert statuses(plans) == {
        "expert/coding/high": "run",
        "evaluate/coding/high": "waits",
        "distill": "waits",
        "evaluate/student": "waits",
        "export": "waits",
        "report": "waits",
    }
    assert plans["expert/coding/high"].reason == "changed optimizer.lr: 0.001 → 0.0005"
    assert plans["distill"].reason == "for expert/coding/high"


def test_resources_are_no_identity(recipe: Path, finished: Path) -> None:
    assert statuses(plan(recipe, finished, "resources.num_slots=4", "resources.threads.expert=2")) == {}


def test_a_forced_stage_with_the_same_bytes_leaves_the_rest_alone(run: Run, recipe: Path, finished: Path) -> None:
    first, second = results(recipe, finished), run(force=["expert/coding/high"])
    again = {name for name in first if first[name].key != second[name].key}
    assert again == {"expert/coding/high"}
    assert second["expert/coding/high"].attempt == 2
    assert second["expert/coding/high"].result_id == first["expert/coding/high"].result_id


def test_a_forced_stage_with_other_bytes_reruns_its_descendants(run: Run, recipe: Path) -> None:
    recipe.write_text(
        recipe.read_text().replace('expert = "fake_stages:make"', 'expert = "fake_stages:make_differently"')
    )
    first, second = run(), run(force=["expert/coding/high"])
    again = {name for name in first if first[name].key != second[name].key}
    assert again == {"expert/coding/high", "evaluate/coding/high", "distill", "evaluate/student", "export", "report"}


@pytest.mark.parametrize("how", ["delete", "change", "add"])
def test_a_damaged_result_does_not_count(run: Run, recipe: Path, finished: Path, how: str) -> None:
    result = results(recipe, finished)["expert/coding/low"]
    path = result.output_path / "result.txt"
    if how == "delete":
        path.unlink()
    elif how == "change":
        path.write_text("0" * 64)
    else:
        (result.output_path / "more.txt").write_text("x")
    plans = plan(recipe, finished)
    assert plans["expert/coding/low"].status == "run"
    assert plans["expert/coding/low"].reason.startswith("output/")
    assert plans["expert/general/low"].status == "cached"
    after = run()
    assert after["expert/coding/low"].attempt == 2
    assert after["expert/coding/low"].result_id == result.result_id
    assert after["distill"].attempt == 1


def test_a_flipped_byte_under_an_old_mtime_is_found_by_a_run(run: Run, recipe: Path, finished: Path) -> None:
    result = results(recipe, finished)["corpus"]
    path = result.output_path / "result.txt"
    status = path.stat()
    path.write_text("f" + path.read_text()[1:] if path.read_text()[0] != "f" else "0" + path.read_text()[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run()["corpus"].attempt == 2


def test_a_copied_workspace_is_as_good_as_the_first(recipe: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy", copy_function=shutil.copyfile)
    assert statuses(plan(recipe, tmp_path / "copy")) == {}


def test_an_unreadable_record_is_no_result(recipe: Path, finished: Path) -> None:
    result = results(recipe, finished)["corpus"]
    record = result.folder / "record.json"
    record.write_text(record.read_text()[:100])
    assert read_record(result.folder) is None
    assert plan(recipe, finished)["corpus"].status == "run"


def test_the_record_and_the_request_tell_all(recipe: Path, finished: Path) -> None:
    result = results(recipe, finished)["expert/coding/high"]
    record = read_record(result.folder)
    assert record == result
    assert result.duration_s >= 0
    assert result.created >= result.started
    assert dict(result.metrics) == {"loss": pytest.approx(1 / 3)}
    assert (result.folder / "request.json").exists()
    assert not (result.folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        ("refuse", StageFailedError, "stage corpus failed: stage corpus cannot work with this input; its log:"),
        ("crash", StageFailedError, "stage corpus failed: KeyError: 'missing'; its log:"),
        ("fill_disk", DiskFullError, "disk full in stage corpus"),
        ("make_nothing", StageFailedError, "stage corpus ended without writing anything"),
    ],
)
def test_a_failing_stage_is_named_in_one_line(
    shop: Shop, recipe: Path, function: str, error: type[Exception], text: str
) -> None:
    recipe.write_text(recipe.read_text().replace('corpus = "fake_stages:make"', f'corpus = "fake_stages:{function}"'))
    spec = build_graph(load_recipe(recipe))["corpus"]
    with pytest.raises(error, match=text) as caught:
        run_stage(shop, spec, {})
    assert "\n" not in str(caught.value)
    assert shop.store.results("corpus") == []


def test_a_failed_stage_stops_only_what_needs_it(run: Run, recipe: Path, workspace: Path) -> None:
    text = recipe.read_text().replace('expert = "fake_stages:make"', 'expert = "fake_stages:refuse"')
    recipe.write_text(text)
    with pytest.raises(StageFailedError, match=r"cannot work.*\(3 more stages failed\); 8 stages wait for it"):
        run()
    done = set(plan(recipe, workspace)) - set(statuses(plan(recipe, workspace)))
    assert done == {"tasks/coding", "tasks/general", "corpus", "midtrain", "budget", "evaluate/base"}


def test_whoever_lost_the_workspace_cannot_commit(shop: Shop, recipe: Path) -> None:
    (shop.lease.root / "lock.json").write_text(
        '{"token": 99, "host": "elsewhere", "pid": 7, "process_start": "1", "command": "nonet run", "since": 0}'
    )
    spec = build_graph(load_recipe(recipe))["corpus"]
    with pytest.raises(WorkspaceHeldError, match=r"taken over by process 7 on elsewhere"):
        run_stage(shop, spec, {})
    assert shop.store.results("corpus") == []


def test_a_function_that_does_not_exist_is_named_with_its_key(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"functions\.corpus = nowhere:f: there is no module nowhere"):
        check_functions(load_recipe(recipe, ["functions.corpus=nowhere:f"]))
    with pytest.raises(ValueError, match=r"domains\.coding\.traces = fake_stages:mak: fake_stages has no mak; it has"):
        check_functions(load_recipe(recipe, ["domains.coding.traces=fake_stages:mak"]))


def test_a_folder_with_other_things_is_no_workspace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for look in (peek_workspace, lambda path: open_workspace(path, create=True)):
        with pytest.raises(ValueError, match=r"is not a workspace \(no nonet\.json in it\)"):
            look(tmp_path)
    with pytest.raises(ValueError, match="there is no workspace at"):
        open_workspace(tmp_path / "none", create=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]
