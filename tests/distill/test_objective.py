"""What the student is pulled towards: the recipe's loss, and the numbers to watch by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.tasks import coding, general
from data.types import Group, Prompt, Rollout, Sample, Verdict
from distill.config import DistillConfig
from distill.objective import loss_of, rollout_metrics, teacher_kl
from engine.batches import pack
from engine.losses import forward_kl, full_vocabulary_divergence, reverse_kl, sampled_token_reverse_kl, sharpen

VOCAB = 5


def config(**changes: object) -> DistillConfig:
    fields = {"divergence": "full_vocabulary", "optimizer": {"lr": 1e-3}, "num_steps": 1, "prompts_per_cell": 1}
    return DistillConfig.model_validate({"seed": 0, "cells": ("general/low",), **fields, **changes})


def scored_sample(teacher: str = "general/low", seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    logprobs = torch.from_numpy(rng.normal(size=(3, VOCAB)).astype(np.float32)).log_softmax(-1).numpy()
    mask = (False, True, False, True, True)
    return Sample(
        token_ids_T=tuple(rng.integers(0, VOCAB, 5).tolist()),
        loss_mask_T=mask,
        sampler_logprobs_T=tuple(float(-rng.random()) if on else 0.0 for on in mask),
        advantages_T=(0.0,) * 5,
        domain=teacher.split("/")[0],
        effort=teacher.split("/")[1],
        teacher=teacher,
        teacher_logprobs_NV=logprobs,
    )


def value_and_gradient(loss: object, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (batch,) = pack([scored_sample()], 100)
    logits = logits.clone().requires_grad_()
    total, _ = loss(logits, batch)
    (gradient,) = torch.autograd.grad(total, logits)
    return total.detach(), gradient


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_full_vocabulary_is_the_share_of_both_directions_to_the_sharpened_teacher(
    share: float, temperature: float
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    chosen = loss_of(config(forward_share=share, teacher_temperature=temperature))
    total, gradient = value_and_gradient(chosen, logits)
    q = sharpen(torch.from_numpy(scored_sample().teacher_logprobs_NV), temperature)
    p = logits.log_softmax(-1)
    expected = (1 - share) * reverse_kl(p, q).sum() + share * forward_kl(p, q).sum()
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    own = value_and_gradient(full_vocabulary_divergence(share, temperature), logits)
    assert torch.equal(gradient, own[1])


def test_sampled_token_is_chosen_with_its_temperature() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    chosen = value_and_gradient(loss_of(config(divergence="sampled_token", teacher_temperature=0.6)), logits)
    sharp = value_and_gradient(sampled_token_reverse_kl(0.6), logits)
    plain = value_and_gradient(sampled_token_reverse_kl(1.0), logits)
    assert torch.equal(chosen[1], sharp[1])
    assert not torch.allclose(chosen[1], plain[1])


@pytest.mark.parametrize(("beta", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_jensen_shannon_ends_in_the_two_one_sided_divergences(beta: float, share: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    chosen = loss_of(config(divergence="jensen_shannon", beta=beta, teacher_temperature=0.6))
    total, gradient = value_and_gradient(chosen, logits)
    expected = value_and_gradient(full_vocabulary_divergence(share, 0.6), logits)
    assert float(total) == pytest.approx(float(expected[0]), rel=1e-6)
    assert torch.allclose(gradient, expected[1], atol=1e-7)


def test_jensen_shannon_by_hand_at_a_half() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    total, _ = value_and_gradient(loss_of(config(divergence="jensen_shannon")), logits)
    p = logits.softmax(-1)
    q = torch.from_numpy(scored_sample().teacher_logprobs_NV).exp()
    m = (p + q) / 2
    expected = ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2
    assert float(total) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_share": 0.0},
        {"forward_share": 0.5},
        {"divergence": "sampled_token"},
        {"divergence": "jensen_shannon", "beta": 0.3},
    ],
    ids=str,
)
def test_student_like_teacher_gets_no_gradient(changes: dict[str, object]) -> None:
    logits = torch.from_numpy(scored_sample().teacher_logprobs_NV)
    total, gradient = value_and_gradient(loss_of(config(**changes)), logits)
    assert abs(float(total)) < 1e-6
    assert gradient.abs().max() < 1e-6


def test_teacher_kl_by_hand() -> None:
    one, two = scored_sample("general/low", 1), scored_sample("coding/max", 2)
    gaps = {}
    for sample in (one, two):
        teacher = [sample.teacher_logprobs_NV[row, sample.token_ids_T[t]] for row, t in enumerate((1, 3, 4))]
        gaps[sample.teacher] = [sample.sampler_logprobs_T[t] - x for t, x in zip((1, 3, 4), teacher, strict=True)]
    metrics = teacher_kl([one, two])
    assert list(metrics) == ["teacher_kl", "teacher_kl/coding/max", "teacher_kl/general/low"]
    for cell, values in gaps.items():
        assert metrics[f"teacher_kl/{cell}"] == pytest.approx(np.mean(values), rel=1e-6)
    assert metrics["teacher_kl"] == pytest.approx(np.mean([v for values in gaps.values() for v in values]), rel=1e-6)


def test_teacher_kl_is_zero_where_student_and_teacher_agree() -> None:
    sample = scored_sample()
    logprobs = [0.0] * 5
    for row, t in enumerate((1, 3, 4)):
        logprobs[t] = float(sample.teacher_logprobs_NV[row, sample.token_ids_T[t]])
    assert teacher_kl([replace(sample, sampler_logprobs_T=tuple(logprobs))])["teacher_kl"] == pytest.approx(0.0)


def test_p20_an_unscored_sample_is_no_zero_but_an_error() -> None:
    unscored = replace(scored_sample(), teacher=None, teacher_logprobs_NV=None)
    with pytest.raises(ValueError, match=r"a sample of general/low has no teacher's log-probabilities"):
        teacher_kl([scored_sample(), unscored])
    for divergence in ("full_vocabulary", "sampled_token"):
        (batch,) = pack([unscored], 100)
        with pytest.raises(ValueError, match="needs the teacher's log-probabilities"):
            loss_of(config(divergence=divergence))(torch.zeros(3, VOCAB), batch)


def group_of(domain: str, outcomes: str, num_tokens: int, cut_off: int = 0) -> Group:
    names = {"p": "pass", "f": "fail", "i": "infra"}
    task = {"general": general, "coding": coding}[domain].make_task(0, 0, "train")
    reasons = ["stop"] * (len(outcomes) - cut_off) + ["length"] * cut_off
    mask = (False, *(True,) * num_tokens)
    zeros = (0.0,) * len(mask)
    rollouts = tuple(Rollout("p", 1, (1,) * len(mask), mask, zeros, (), reason, 1) for reason in reasons)
    return Group(Prompt(task, "low", (1,)), rollouts, tuple(Verdict(names[o], float(o == "p")) for o in outcomes))


def test_rollout_metrics_by_hand() -> None:
    groups = [group_of("general", "pf", 4), group_of("coding", "pppi", 7, cut_off=3), group_of("general", "fi", 1)]
    metrics = rollout_metrics(groups)
    assert metrics["accuracy"] == pytest.approx(4 / 6)
    assert metrics["accuracy/coding/low"] == 1.0
    assert metrics["accuracy/general/low"] == pytest.approx(1 / 3)
    assert metrics["tokens"] == pytest.approx((2 * 4 + 4 * 7 + 2 * 1) / 8)
    assert metrics["truncated"] == pytest.approx(3 / 8)


def test_a_cell_that_could_not_be_graded_has_no_accuracy_and_none_at_all_is_an_error() -> None:
    metrics = rollout_metrics([group_of("general", "pf", 4), group_of("coding", "ii", 4)])
    assert "accuracy/coding/low" not in metrics
    assert metrics["accuracy"] == 0.5
    assert all(math.isfinite(value) for value in metrics.values())
    with pytest.raises(ValueError, match=r"none of the rollouts of \['coding/low'\] could be graded"):
        rollout_metrics([group_of("coding", "ii", 4)])
