"""The real pipeline, made small: the smoke recipe with overrides, run by the real command with Prefect and MLflow."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = {
    **{
        f"domains.{d}.{key}": n
        for d in ("coding", "research", "general")
        for key, n in (("num_train", 48), ("num_test", 8))
    },
    "corpus.num_documents": 600,
    "corpus.vocab_size": 320,
    "midtrain.num_steps": 60,
    "midtrain.batch_size": 32,
    "midtrain.checkpoint_every": 8,
    "midtrain.optimizer.lr": 0.02,
    "midtrain.optimizer.adam_lr": 0.02,
    "budget.num_tasks": 16,
    "expert.num_steps": 12,
    "expert.checkpoint_every": 2,
    "distill.num_steps": 10,
    "distill.checkpoint_every": 2,
    "evaluate.num_tasks": 6,
    "evaluate.num_tasks_other": 2,
}


class Nonet:
    """The command as a user calls it, on the small recipe."""

    root = ROOT
    recipe = str(ROOT / "recipes" / "smoke.toml")
    overrides = tuple(part for key, value in OVERRIDES.items() for part in ("--set", f"{key}={value}"))

    def __call__(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(_command(arguments), capture_output=True, text=True, timeout=600, check=False)

    def run(self, workspace: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self("run", self.recipe, *self.overrides, "-w", str(workspace), *arguments)

    def start(self, workspace: Path) -> "subprocess.Popen[str]":
        command = _command(["run", self.recipe, *self.overrides, "-w", str(workspace)])
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _command(arguments: Any) -> list[str]:
    return [sys.executable, "-c", "from flows.cli import main; main()", *arguments]


@pytest.fixture(scope="session")
def nonet() -> Nonet:
    return Nonet()


@pytest.fixture(scope="session")
def reference(nonet: Nonet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the pipeline has run once, uninterrupted. To be looked at only."""
    workspace = tmp_path_factory.mktemp("reference") / "workspace"
    result = nonet.run(workspace)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return workspace


Records = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="session")
def records_of() -> Callable[[Path], Records]:
    """All records of a workspace by the attempt's folder within the store."""

    def read(workspace: Path) -> Records:
        store = workspace / "store"
        return {
            str(path.parent.relative_to(store)): json.loads(path.read_text())
            for path in sorted(store.rglob("record.json"))
        }

    return read
