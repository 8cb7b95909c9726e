"""An expert's inputs: a tiny base, easy tasks, a budget; graders that fail or cut the process off."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.arrow import load_rows, save_rows
from data.stage import StageRequest

CONFIG = {
    "domain": "general",
    "effort": "low",
    "seed": 3,
    "optimizer": {"lr": 2e-3},
    "num_steps": 5,
    "prompts_per_step": 6,
    "group_size": 8,
    "checkpoint_every": 5,
    "tokens_per_micro_batch": 1024,
}
GRADERS = '''
"""An easy grader, and graders with the faults of real ones."""

from data.graders import exact
from data.types import Verdict

calls = {"number": 0, "cut": 0}


class CutError(Exception):
    pass


def even(pairs):
    """Any even digit will do: a habit that is soon learned."""
    right = [t.answer is not None and t.answer in set("02468") for _, t in pairs]
    return [Verdict("pass", 1.0) if r else Verdict("fail", 0.0) for r in right]


def half_unreachable(pairs):
    """Every second verdict is an infrastructure failure."""
    return [Verdict("infra", 0.0) if i % 2 else v for i, v in enumerate(exact.grade(pairs))]


def unreachable(pairs):
    return [Verdict("infra", 0.0) for _ in pairs]


def cut_off(pairs):
    """The process ends in the call number ``calls["cut"]``."""
    calls["number"] += 1
    if calls["number"] == calls["cut"]:
        raise CutError
    return even(pairs)
'''

NewExpert = Callable[..., StageRequest]


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module ``faulty_graders``, freshly imported."""
    import importlib
    import sys

    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "faulty_graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    sys.modules.pop("faulty_graders", None)
    return importlib.import_module("faulty_graders")


@pytest.fixture
def new_expert(new_request: Any, base_path: Path, easy_path: Path, tmp_path: Path) -> NewExpert:
    """The request of an expert of general/low on the easy tasks; ``grader`` replaces theirs."""
    (tmp_path / "budgets.json").write_text(json.dumps({"general/low": 8}))

    def make(grader: str | None = None, **changes: Any) -> StageRequest:
        tasks = easy_path
        if grader is not None:
            tasks = tmp_path / grader.replace(":", "-")
            if not tasks.exists():
                rows = [row | {"grader": grader} for row in load_rows(easy_path / "train")]
                save_rows(rows, tasks / "train")
        inputs = {"start": base_path, "budget": tmp_path, "tasks": tasks}
        return new_request("expert", CONFIG | changes, inputs, stage="expert/general/low")

    return make
