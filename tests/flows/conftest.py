"""A small recipe of fake stages, and ways to run it: in this process without Prefect, or as the real command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flows.session import open_session
from flows.specs import KINDS, StageResult, StageSpec
from flows.stages import Inputs, run_stage

RECIPE = """
name = "fake"
seed = 0
efforts = ["low", "high"]
corpus = { num_documents = 8, own_style = 0.5, step_error = 0.0, vocab_size = 300 }
evaluate = { num_tasks = 4, num_tasks_other = 2, samples_per_task = 2, max_turns = 2 }
export = { name = "fake" }
[domains]
coding = { generator = "fake_stages:make", traces = "fake_stages:make", num_train = 8, num_test = 8 }
general = { generator = "fake_stages:make", traces = "fake_stages:make", num_train = 8, num_test = 8 }
[budget]
num_tasks = 4
max_new_tokens = 8
max_turns = 2
quantile = { low = 0.9, high = 0.9 }
scale = { low = 1.0, high = 1.0 }
[midtrain]
num_steps = 3
batch_size = 2
optimizer.lr = 1e-3
model = { hidden_size = 8, num_layers = 1, num_heads = 2, num_kv_heads = 1, head_dim = 4, intermediate_size = 8 }
[expert]
start = "base"
num_steps = 3
prompts_per_step = 2
group_size = 2
optimizer.lr = 1e-3
[distill]
num_steps = 3
prompts_per_cell = 2
divergence = "full_vocabulary"
optimizer.lr = 1e-3
[functions]
"""
FUNCTIONS = "".join(f'{kind} = "fake_stages:make"\n' for kind in KINDS)

Run = Callable[..., dict[str, StageResult]]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's file; its functions can be imported here and in workers."""
    return write_recipe(tmp_path, monkeypatch)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


@pytest.fixture
def run(recipe: Path, workspace: Path) -> Run:
    """Runs the recipe in this process with real workers and real MLflow, the stages started from a thread pool."""

    def call(overrides: Sequence[str] = (), force: Sequence[str] = ()) -> dict[str, StageResult]:
        return run_all(recipe, workspace, overrides, force)

    return call


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_all(write_recipe(folder, monkeypatch), folder / "workspace")
    return folder / "workspace"


@pytest.fixture
def finished(finished_once: Path, workspace: Path) -> Path:
    """A workspace in which every stage of the recipe has its result."""
    shutil.copytree(finished_once, workspace)
    return workspace


def write_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", here)
    path = folder / "fake.toml"
    path.write_text(RECIPE + FUNCTIONS)
    return path


def run_all(
    recipe: Path, workspace: Path, overrides: Sequence[str] = (), force: Sequence[str] = ()
) -> dict[str, StageResult]:
    with (
        ThreadPoolExecutor() as pool,
        open_session(str(recipe), str(workspace), overrides, force, silent=True) as session,
    ):

        def start(spec: StageSpec, inputs: Inputs) -> Future[StageResult]:
            return pool.submit(run_stage, session.shop, spec, inputs)

        schedule = session.schedule(start)
        for stage in session.graph:
            schedule(stage)
        return schedule.run()


@pytest.fixture
def nonet(recipe: Path, workspace: Path) -> Command:
    """The command as a user calls it, on the workspace."""

    def call(*arguments: str, start: bool = False, **options: Any) -> Any:
        command = [sys.executable, "-c", "from flows.cli import main; main()", *arguments, "-w", str(workspace)]
        if start:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen(command, **pipes, env=dict(os.environ), **options)
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **options)

    return call
