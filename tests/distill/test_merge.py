"""The merge loop: fair turns, each teacher its own pull, no pull where they agree, and a cut that leaves no trace."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data.markup import Markup
from data.stage import StageRequest
from data.stages import load_tasks
from data.types import Group, Rollout, Verdict
from distill.config import DistillConfig
from distill.merge import prompts_of, to_samples, train
from engine.weights import load_model, save_model

CELLS = ("coding/high", "general/low", "research/max")
CONFIG = {
    "seed": 6,
    "cells": list(CELLS),
    "optimizer": {"lr": 3e-3},
    "num_steps": 5,
    "prompts_per_cell": 2,
    "samples_per_prompt": 2,
    "divergence": "full_vocabulary",
    "checkpoint_every": 2,
    "max_turns": 3,
    "tokens_per_micro_batch": 512,
}

NewMerge = Callable[..., StageRequest]


@pytest.fixture(scope="module")
def teacher_paths(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> dict[str, Path]:
    """Three teachers, each the base pushed some way of its own."""
    paths = {}
    for seed, cell in enumerate(CELLS):
        model = load_model(base_path)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        paths[cell] = tmp_path_factory.mktemp("teacher") / "output"
        save_model(model, paths[cell], tokenizer_from=base_path)
    return paths


@pytest.fixture
def new_merge(
    new_request: Any, base_path: Path, budget_path: Path, task_paths: dict[str, Path], teacher_paths: dict[str, Path]
) -> NewMerge:
    """The request of a merge; ``teachers`` replaces some teachers' folders."""

    def make(teachers: dict[str, Path] | None = None, **changes: Any) -> StageRequest:
        roles = {f"teacher/{cell}": path for cell, path in (teacher_paths | (teachers or {})).items()}
        inputs = {"start": base_path, "budget": budget_path, **task_paths, **roles}
        return new_request("distill", CONFIG | changes, inputs)

    return make


def metrics_of(request: StageRequest) -> list[dict[str, float]]:
    return [json.loads(line) for line in request.metrics_path.read_text().splitlines()]


def weights_of(folder: Path) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in load_model(folder).parameters()])


def moved(request: StageRequest) -> torch.Tensor:
    return weights_of(request.output_path) - weights_of(request.input("start"))


def test_every_step_has_as_many_prompts_of_every_cell_and_a_start_goes_on(
    markup: Markup, task_paths: dict[str, Path]
) -> None:
    config = DistillConfig.model_validate(CONFIG)
    tasks = {role.split("/")[1]: load_tasks(path, "train") for role, path in task_paths.items()}
    steps = list(islice(prompts_of(config, markup, tasks, start=0), 24))
    assert all(Counter(p.cell for p in prompts) == dict.fromkeys(CELLS, 2) for prompts in steps)
    for cell in CELLS:
        seen = [p.task.id for prompts in steps for p in prompts if p.cell == cell]
        assert sorted(seen) == sorted(task.id for task in tasks[cell.split("/")[0]])  # 48 tasks, an epoch
    assert list(islice(prompts_of(config, markup, tasks, start=7), 17)) == steps[7:]


def test_to_samples_takes_every_rollout_whatever_its_verdict(markup: Markup, task_paths: dict[str, Path]) -> None:
    prompt = markup.render_prompt(load_tasks(task_paths["tasks/general"], "train")[0], "low")
    rollouts = tuple(
        Rollout(prompt.id, 1, (1, 5, n), (False, True, True), (0.0, -0.5, -0.25), (), "stop", 1) for n in range(3)
    )
    verdicts = tuple(Verdict(outcome, 1.0) for outcome in ("pass", "fail", "infra"))
    samples = to_samples(Group(prompt, rollouts, verdicts))
    assert [s.token_ids_T for s in samples] == [r.token_ids_T for r in rollouts]
    assert {s.sampler_logprobs_T for s in samples} == {(0.0, -0.5, -0.25)}
    assert {s.advantages_T for s in samples} == {(0.0, 0.0, 0.0)}
    assert {(s.domain, s.effort, s.teacher) for s in samples} == {("general", "low", None)}


@pytest.mark.parametrize("divergence", ["full_vocabulary", "sampled_token"])
def test_the_student_comes_closer_to_its_teachers(new_merge: NewMerge, divergence: str) -> None:
    request = new_merge(divergence=divergence, num_steps=14, prompts_per_cell=4)
    summary = train(request)
    rows = metrics_of(request)
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert summary["teacher_kl"] == pytest.approx(sum(row["teacher_kl"] for row in rows[-5:]) / 5)
    assert summary["teacher_kl"] < 0.6 * rows[0]["teacher_kl"]
    assert rows[0].keys() > {f"teacher_kl/{cell}" for cell in CELLS}
    assert max(row["sampler_kl"] for row in rows) < 1e-6


@pytest.mark.parametrize("divergence", ["full_vocabulary", "sampled_token"])
def test_a_student_like_its_teachers_is_not_pulled_at_all(
    new_merge: NewMerge, base_path: Path, divergence: str
) -> None:
    own = new_merge(dict.fromkeys(CELLS, base_path), divergence=divergence, num_steps=1)
    other = new_merge(divergence=divergence, num_steps=1)
    train(own)
    train(other)
    (row,), (pulled,) = metrics_of(own), metrics_of(other)
    assert abs(row["loss"]) < 1e-5
    assert abs(row["teacher_kl"]) < 1e-5
    assert row["grad_norm"] < 1e-5 < 1e-2 < pulled["grad_norm"]


def test_p1_swapping_a_teacher_changes_the_step(new_merge: NewMerge, teacher_paths: dict[str, Path]) -> None:
    plain = new_merge(num_steps=1)
    swapped = new_merge({"general/low": teacher_paths["coding/high"]}, num_steps=1)
    for request in (plain, swapped):
        train(request)
    (one,), (two,) = metrics_of(plain), metrics_of(swapped)
    cells = {cell: one[f"teacher_kl/{cell}"] != two[f"teacher_kl/{cell}"] for cell in CELLS}
    assert cells == {"coding/high": False, "general/low": True, "research/max": False}
    assert torch.nn.functional.cosine_similarity(moved(plain), moved(swapped), dim=0) < 0.99


def test_a_cell_is_pulled_by_its_own_teacher_alone(new_merge: NewMerge, teacher_paths: dict[str, Path]) -> None:
    alone = new_merge(cells=["general/low"], num_steps=2)
    with_others = new_merge(dict.fromkeys(CELLS, teacher_paths["general/low"]), cells=["general/low"], num_steps=2)
    wrong = new_merge({"general/low": teacher_paths["coding/high"]}, cells=["general/low"], num_steps=2)
    for request in (alone, with_others, wrong):
        train(request)
    assert torch.equal(moved(alone), moved(with_others))
    assert not torch.equal(moved(alone), moved(wrong))


def test_p21_a_cell_without_a_teacher_is_refused_before_anything_is_trained(new_merge: NewMerge) -> None:
    request = new_merge(cells=[*CELLS, "coding/low"])
    with pytest.raises(ValueError, match=r"no teacher for \['coding/low'\]"):
        train(request)
    assert not request.metrics_path.exists()


def test_sharpening_pulls_elsewhere(new_merge: NewMerge) -> None:
    plain, sharp = new_merge(num_steps=1), new_merge(num_steps=1, teacher_temperature=0.6)
    for request in (plain, sharp):
        train(request)
    assert metrics_of(plain)[0]["teacher_kl"] == metrics_of(sharp)[0]["teacher_kl"]
    assert metrics_of(plain)[0]["reverse_kl"] != metrics_of(sharp)[0]["reverse_kl"]
    assert not torch.equal(moved(plain), moved(sharp))


@pytest.mark.parametrize(("step", "after"), [(1, True), (2, True), (3, False), (4, True), (5, True)])
def test_a_cut_run_ends_like_an_uninterrupted_one(
    new_merge: NewMerge, cut: Any, same_work: Any, step: int, after: bool
) -> None:
    whole, request = new_merge(), new_merge()
    train(whole)
    with cut("distill.merge", step, after):
        train(request)
    assert not (request.output_path / "model.safetensors").exists()
    train(request)
    assert same_work(request, whole)


def test_cut_after_its_last_step_it_only_writes_its_output(new_merge: NewMerge, same_work: Any) -> None:
    whole, request = new_merge(), new_merge()
    for done in (whole, request):
        train(done)
    shutil.rmtree(request.output_path)
    train(request)
    assert same_work(request, whole)


def test_killed_at_several_instants_it_ends_with_the_same_bits(
    new_merge: NewMerge, workers: Any, same_work: Any
) -> None:
    whole, killed = (new_merge(num_steps=20, checkpoint_every=1) for _ in range(2))
    workers.run(whole, "distill.merge:train")
    rng = random.Random(0)
    landed = [workers.run_killed(killed, "distill.merge:train", steps, rng.uniform(0, 0.05)) for steps in (0, 3, 7, 11)]
    assert sum(landed) >= 3
    workers.run(killed, "distill.merge:train")
    assert same_work(killed, whole)
