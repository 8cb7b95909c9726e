"""The RL loop: it learns, keeps grader failures out, and an interrupted run ends as if nothing had happened."""

import json
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from data.arrow import load_rows
from data.stage import StageRequest
from engine.weights import load_model
from experts.rl import KEPT_GROUPS, train

NewExpert = Callable[..., StageRequest]
SHORT = {"num_steps": 6, "checkpoint_every": 2, "prompts_per_step": 3, "group_size": 4}


def metrics_of(request: StageRequest) -> list[dict[str, float]]:
    return [json.loads(line) for line in request.metrics_path.read_text().splitlines()]


def weights_of(folder: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in load_model(folder).parameters()])


def test_reward_rises_on_an_easy_task(new_expert: NewExpert, graders: Any) -> None:
    request = new_expert("faulty_graders:even", num_steps=12, prompts_per_step=8)
    summary = train(request)
    rows = metrics_of(request)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert summary["reward"] == pytest.approx(sum(row["reward"] for row in rows[-5:]) / 5)
    assert summary["reward"] > sum(row["reward"] for row in rows[:3]) / 3 + 0.15
    assert rows[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert max(row["sampler_kl"] for row in rows) < 1e-6
    assert {row["clipped"] for row in rows} == {0.0}


def test_groups_are_stored_at_every_checkpoint(new_expert: NewExpert) -> None:
    request = new_expert(num_steps=5, checkpoint_every=2)
    train(request)
    rows = load_rows(request.output_path / "rollouts")
    assert [row["step"] for row in rows] == [step for step in (2, 4, 5) for _ in range(KEPT_GROUPS * 8)]
    assert {row["num_tokens"] <= 8 for row in rows} == {True}
    for start in range(0, len(rows), 8):
        group = rows[start : start + 8]
        assert len({row["task_id"] for row in group}) == 1
        assert sum(row["advantage"] for row in group) == pytest.approx(0.0, abs=1e-6)
        assert all((row["outcome"] == "pass") == (row["reward"] == 1.0) for row in group)
        assert all("<|answer|>7<|end|>" in row["completion"] for row in group if row["outcome"] == "pass")


def test_without_variance_in_any_group_the_weights_stay(new_expert: NewExpert, graders: Any) -> None:
    graders.always = lambda pairs: [type(v)("pass", 1.0) for v in graders.exact.grade(pairs)]
    request = new_expert("faulty_graders:always", num_steps=2, over_budget_reward=1.0)
    train(request)
    assert {row["kept_groups"] for row in metrics_of(request)} == {0.0}
    assert torch.equal(weights_of(request.output_path), weights_of(request.input("start")))


def test_a_grader_that_fails_now_and_then_costs_rollouts_not_reward(new_expert: NewExpert, graders: Any) -> None:
    request = new_expert("faulty_graders:half_unreachable", num_steps=3, checkpoint_every=1)
    train(request)
    assert {row["infra"] for row in metrics_of(request)} == {0.5}
    rows = load_rows(request.output_path / "rollouts")
    assert {row["advantage"] for row in rows if row["outcome"] == "infra"} == {0.0}
    graded = [row for row in rows if row["outcome"] != "infra"]
    assert len(graded) == len(rows) / 2
    for start in range(0, len(graded), 4):
        assert sum(row["advantage"] for row in graded[start : start + 4]) == pytest.approx(0.0, abs=1e-6)


def test_a_grader_that_never_answers_ends_the_stage_with_a_remedy(new_expert: NewExpert, graders: Any) -> None:
    with pytest.raises(ValueError, match=r"none of the step's rollouts could be graded: see to the grader"):
        train(new_expert("faulty_graders:unreachable"))


def test_seeds_make_runs_of_their_own(new_expert: NewExpert, same_work: Any) -> None:
    one, again, other = new_expert(**SHORT), new_expert(**SHORT), new_expert(**SHORT, seed=4)
    for request in (one, again, other):
        train(request)
    assert same_work(one, again)
    assert not same_work(one, other)


@pytest.mark.parametrize(("step", "after"), [(1, False), (2, True), (3, False), (4, True), (5, True), (6, True)])
def test_a_run_cut_at_an_update_ends_like_an_uninterrupted_one(
    new_expert: NewExpert, graders: Any, cut: Any, same_work: Any, step: int, after: bool
) -> None:
    whole, request = (new_expert("faulty_graders:even", **SHORT) for _ in range(2))
    train(whole)
    with cut("experts.rl", step, after):
        train(request)
    assert not (request.output_path / "model.safetensors").exists()
    train(request)
    assert same_work(request, whole)


@pytest.mark.parametrize("call", [1, 3, 4, 6])
def test_a_run_cut_while_grading_ends_like_an_uninterrupted_one(
    new_expert: NewExpert, graders: Any, same_work: Any, call: int
) -> None:
    whole, request = (new_expert("faulty_graders:cut_off", **SHORT) for _ in range(2))
    train(whole)
    graders.calls |= {"number": 0, "cut": call}
    with pytest.raises(graders.CutError):
        train(request)
    train(request)
    assert graders.calls["number"] == 6 + 1 + (call - 1) % 2  # the call cut off, and steps since the last checkpoint
    assert same_work(request, whole)


def test_cut_after_its_last_step_it_only_writes_its_output(new_expert: NewExpert, same_work: Any) -> None:
    whole, request = new_expert(**SHORT), new_expert(**SHORT)
    for done in (whole, request):
        train(done)
    shutil.rmtree(request.output_path)
    train(request)
    assert same_work(request, whole)


def test_killed_at_several_instants_it_ends_with_the_same_bits(
    new_expert: NewExpert, workers: Any, same_work: Any
) -> None:
    whole, killed = (new_expert(num_steps=24, checkpoint_every=1) for _ in range(2))
    workers.run(whole, "experts.rl:train")
    rng = random.Random(0)
    landed = [
        workers.run_killed(killed, "experts.rl:train", steps, rng.uniform(0.0, 0.05)) for steps in (0, 3, 7, 11, 15)
    ]
    assert sum(landed) >= 3
    workers.run(killed, "experts.rl:train")
    assert same_work(killed, whole)
