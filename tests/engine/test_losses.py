"""Losses three ways: closed forms on a tabular policy (every token enumerated), gradcheck in fp64, invariances.

Legend: N tokens, V vocabulary; the tabular policy is one row of logits a state.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from engine.batches import Batch
from engine.losses import (
    Loss,
    clipped_policy_gradient,
    cross_entropy,
    forward_kl,
    full_vocabulary_divergence,
    jensen_shannon,
    log_softmax,
    reverse_kl,
    sampled_token_reverse_kl,
    sharpen,
)

N, V = 5, 7


def random_logits(seed: int, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_batch(
    targets: Tensor, sampler: Tensor | None = None, advantages: Tensor | None = None, teacher: Tensor | None = None
) -> Batch:
    n, empty = len(targets), torch.zeros(1, 1, dtype=torch.int64)
    return Batch(
        token_ids_BT=empty,
        position_ids_BT=empty,
        visible_BTT=None,
        source_U=torch.arange(n),
        state_N=torch.arange(n),
        target_ids_N=targets,
        sampler_logprobs_N=torch.full((n,), -1.0, dtype=torch.float64) if sampler is None else sampler,
        advantages_N=torch.zeros(n, dtype=torch.float64) if advantages is None else advantages,
        teacher_logprobs_NV=teacher,
        sample_ids=(0,),
        counts=(n,),
        num_loss_tokens=n,
    )


TARGETS = torch.tensor([0, 3, 6, 3, 2])
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 0.0, -0.3], dtype=torch.float64)
TEACHER = log_softmax(random_logits(1))
LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "clipped": clipped_policy_gradient(0.2, 0.28),
    "sampled": sampled_token_reverse_kl(),
    "sampled_sharp": sampled_token_reverse_kl(0.6),
    "reverse": full_vocabulary_divergence(0.0),
    "mixed": full_vocabulary_divergence(0.3, 0.6),
    "forward": full_vocabulary_divergence(1.0),
}


def gradient(loss: Loss, logits: Tensor, batch: Batch) -> Tensor:
    logits = logits.clone().requires_grad_()
    loss(logits, batch)[0].backward()
    assert logits.grad is not None
    return logits.grad


def full_batch(logits: Tensor) -> Batch:
    sampler = log_softmax(logits).gather(1, TARGETS[:, None]).squeeze(1) + 0.05 * ADVANTAGES
    return make_batch(TARGETS, sampler.detach(), ADVANTAGES, TEACHER)


def policy_gradient(logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """-A grad log pi by hand: -A (onehot - p)."""
    onehot = torch.nn.functional.one_hot(targets, V).to(logits.dtype)
    return -advantages[:, None] * (onehot - logits.softmax(-1))


# --- what every loss keeps


@pytest.mark.parametrize("name", ["cross_entropy", "clipped", "reverse", "mixed", "forward"])
def test_gradcheck(name: str) -> None:
    logits = random_logits(0)
    batch = full_batch(logits)
    assert gradcheck(lambda x: LOSSES[name](x, batch)[0], logits.clone().requires_grad_())


def test_gradcheck_of_the_divergences() -> None:
    logits, teacher = random_logits(0), random_logits(1)
    for divergence in (reverse_kl, forward_kl, lambda p, q: jensen_shannon(p, q, 0.3)):
        inputs = (logits.clone().requires_grad_(), teacher.clone().requires_grad_())
        assert gradcheck(lambda s, t, f=divergence: f(log_softmax(s), log_softmax(t)), inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_p7_sums_add_up_over_any_split_of_the_tokens(name: str) -> None:
    logits = random_logits(0)
    batch = full_batch(logits)
    total, metrics = LOSSES[name](logits, batch)
    parts = []
    for cut in (slice(0, 2), slice(2, N)):
        part = make_batch(TARGETS[cut], batch.sampler_logprobs_N[cut], ADVANTAGES[cut], TEACHER[cut])
        parts.append(LOSSES[name](logits[cut], part))
    assert total == pytest.approx(float(parts[0][0] + parts[1][0]), abs=1e-12)
    for key, value in metrics.items():
        assert value == pytest.approx(float(parts[0][1][key] + parts[1][1][key]), abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_constant_added_to_the_logits_changes_nothing(name: str) -> None:
    logits = random_logits(0)
    batch = full_batch(logits)
    assert torch.allclose(
        gradient(LOSSES[name], logits + 9.0, batch), gradient(LOSSES[name], logits, batch), atol=1e-12
    )
    assert gradient(LOSSES[name], logits, batch).sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_are_detached_and_arguments_are_not_changed(name: str) -> None:
    logits = random_logits(0).requires_grad_()
    batch = full_batch(logits)
    kept = (logits.detach().clone(), TEACHER.clone(), batch.sampler_logprobs_N.clone())
    _, metrics = LOSSES[name](logits, batch)
    assert metrics
    assert not any(value.requires_grad for value in metrics.values())
    assert all(map(torch.equal, kept, (logits.detach(), TEACHER, batch.sampler_logprobs_N)))


def test_arithmetic_is_fp32_for_half_precision_logits() -> None:
    logits = random_logits(0).to(torch.bfloat16)
    assert log_softmax(logits).dtype == torch.float32
    assert torch.equal(log_softmax(logits), log_softmax(logits.float()))


# --- cross-entropy


def test_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    total, metrics = cross_entropy(logits, make_batch(torch.tensor([1, 1])))
    assert total == pytest.approx(-math.log(3 / 4) - math.log(1 / 5), rel=1e-6)
    assert metrics["token_accuracy"] == 1.0


# --- clipped policy gradient


def test_on_policy_gradient_is_advantage_times_score_and_no_clip_acts() -> None:
    logits = random_logits(0)
    sampler = log_softmax(logits).gather(1, TARGETS[:, None]).squeeze(1)
    batch = make_batch(TARGETS, sampler, ADVANTAGES)
    loss = clipped_policy_gradient(0.2, 0.28)
    assert torch.allclose(gradient(loss, logits, batch), policy_gradient(logits, TARGETS, ADVANTAGES), atol=1e-12)
    _, metrics = loss(logits, batch)
    assert metrics["ratio"] == pytest.approx(N)
    assert metrics["clipped"] == 0.0
    assert metrics["sampler_kl"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["entropy"] == pytest.approx(float(torch.distributions.Categorical(logits=logits).entropy().sum()))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "moves"),
    [
        (1.1, 1.0, 1.1, True),
        (1.5, 1.0, 1.28, False),  # above 1 + clip_high
        (0.5, 1.0, 0.5, True),  # the clip never helps a positive advantage below
        (1.5, -1.0, -1.5, True),
        (0.5, -1.0, -0.8, False),  # below 1 - clip_low
        (0.9, -1.0, -0.9, True),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, value: float, moves: bool) -> None:
    logits = torch.zeros(1, 2, dtype=torch.float64)
    sampler = torch.tensor([math.log(0.5 / ratio)], dtype=torch.float64)
    batch = make_batch(torch.tensor([1]), sampler, torch.tensor([advantage], dtype=torch.float64))
    loss = clipped_policy_gradient(0.2, 0.28)
    total, metrics = loss(logits, batch)
    assert total == pytest.approx(-value)
    assert metrics["clipped"] == (0.0 if moves else 1.0)
    assert (gradient(loss, logits, batch).abs().max() > 0) == moves


def test_expected_policy_gradient_is_that_of_the_expected_reward() -> None:
    logits, reward = random_logits(0)[:1], random_logits(2)[0]
    probs = logits.softmax(-1)[0]
    mean = torch.zeros(1, V, dtype=torch.float64)
    for token in range(V):
        sampler = log_softmax(logits)[0, token : token + 1]
        batch = make_batch(torch.tensor([token]), sampler, reward[token : token + 1])
        mean += probs[token] * gradient(clipped_policy_gradient(0.2, 0.2), logits, batch)
    exact = logits.clone().requires_grad_()
    (-(exact.softmax(-1)[0] * reward).sum()).backward()
    assert torch.allclose(mean, exact.grad, atol=1e-12)


def test_sampler_kl_is_an_unbiased_estimate_of_kl_of_sampler_to_policy() -> None:
    logits, behaviour = random_logits(0)[:1], log_softmax(random_logits(3)[:1])
    estimate = 0.0
    for token in range(V):
        batch = make_batch(torch.tensor([token]), behaviour[0, token : token + 1], torch.ones(1, dtype=torch.float64))
        _, metrics = clipped_policy_gradient(0.2, 0.2)(logits, batch)
        estimate += float(behaviour[0, token].exp() * metrics["sampler_kl"])
    exact = (behaviour.exp() * (behaviour - log_softmax(logits))).sum()
    assert estimate == pytest.approx(float(exact), abs=1e-12)
    assert exact > 0.1


# --- distillation


def test_reverse_kl_gradient_by_hand() -> None:
    logits = random_logits(0)
    p, log_ratio = logits.softmax(-1), log_softmax(logits) - TEACHER
    expected = p * (log_ratio - (p * log_ratio).sum(-1, keepdim=True))
    batch = full_batch(logits)
    assert torch.allclose(gradient(full_vocabulary_divergence(0.0), logits, batch), expected, atol=1e-12)


def test_forward_kl_gradient_by_hand() -> None:
    logits = random_logits(0)
    batch = full_batch(logits)
    expected = logits.softmax(-1) - TEACHER.exp()
    assert torch.allclose(gradient(full_vocabulary_divergence(1.0), logits, batch), expected, atol=1e-12)


def test_share_of_forward_kl_mixes_values_and_gradients() -> None:
    logits = random_logits(0)
    batch = full_batch(logits)
    ends = [full_vocabulary_divergence(share) for share in (0.0, 1.0)]
    mixed = full_vocabulary_divergence(0.3)
    assert mixed(logits, batch)[0] == pytest.approx(
        float(0.7 * ends[0](logits, batch)[0] + 0.3 * ends[1](logits, batch)[0])
    )
    expected = 0.7 * gradient(ends[0], logits, batch) + 0.3 * gradient(ends[1], logits, batch)
    assert torch.allclose(gradient(mixed, logits, batch), expected, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_expected_sampled_token_gradient_is_the_exact_reverse_kl_gradient(temperature: float) -> None:
    logits = random_logits(0)
    probs = logits.softmax(-1)
    mean = torch.zeros(N, V, dtype=torch.float64)
    for token in range(V):
        batch = make_batch(torch.full((N,), token), teacher=TEACHER)
        mean += probs[:, token, None] * gradient(sampled_token_reverse_kl(temperature), logits, batch)
    exact = gradient(full_vocabulary_divergence(0.0, temperature), logits, full_batch(logits))
    assert torch.allclose(mean, exact, atol=1e-12)
    assert exact.norm() > 0.5


def test_p1_swapping_the_teacher_changes_the_gradient() -> None:
    logits, other = random_logits(0), log_softmax(random_logits(9))
    for name in ("sampled", "reverse", "mixed", "forward"):
        one = gradient(LOSSES[name], logits, make_batch(TARGETS, teacher=TEACHER))
        two = gradient(LOSSES[name], logits, make_batch(TARGETS, teacher=other))
        assert (one - two).norm() > 0.1


def test_p3_a_token_that_the_teacher_likes_less_is_pushed_down_not_clamped() -> None:
    logits = random_logits(0)
    batch = make_batch(TARGETS, teacher=TEACHER)
    advantages = (TEACHER - log_softmax(logits)).gather(1, TARGETS[:, None]).squeeze(1)
    assert (advantages < -0.1).any()
    assert (advantages > 0.1).any()
    pushed = gradient(sampled_token_reverse_kl(), logits, batch).gather(1, TARGETS[:, None]).squeeze(1)
    assert torch.equal(pushed.sign(), -advantages.sign())


def test_p4_no_gradient_through_the_advantage_or_the_teacher() -> None:
    logits = random_logits(0)
    teacher = TEACHER.clone().requires_grad_()
    advantages = (TEACHER - log_softmax(logits)).gather(1, TARGETS[:, None]).squeeze(1)
    batch = make_batch(TARGETS, teacher=TEACHER)
    assert torch.allclose(
        gradient(sampled_token_reverse_kl(), logits, batch), policy_gradient(logits, TARGETS, advantages), atol=1e-12
    )
    for name in ("sampled", "mixed"):
        student = logits.clone().requires_grad_()
        LOSSES[name](student, make_batch(TARGETS, teacher=teacher))[0].backward()
        assert teacher.grad is None


def test_p5_names_say_the_direction() -> None:
    student, teacher = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert reverse_kl(student, teacher) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)
    assert forward_kl(student, teacher) == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5), rel=1e-5)
    assert forward_kl(student, teacher) == pytest.approx(
        float(torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="sum")), rel=1e-5
    )


def test_p6_teacher_equal_to_student_gives_no_push_at_all() -> None:
    logits = random_logits(0)
    batch = make_batch(TARGETS, advantages=ADVANTAGES, teacher=log_softmax(logits))
    for name in ("sampled", "reverse", "forward"):
        total, _ = LOSSES[name](logits, batch)
        assert total == pytest.approx(0.0, abs=1e-12)
        assert gradient(LOSSES[name], logits, batch).abs().max() < 1e-12


def test_jensen_shannon_ends_are_the_one_sided_divergences_and_the_middle_is_symmetric() -> None:
    student, teacher = log_softmax(random_logits(0)), TEACHER
    assert torch.equal(jensen_shannon(student, teacher, 0.0), forward_kl(student, teacher))
    assert torch.equal(jensen_shannon(student, teacher, 1.0), reverse_kl(student, teacher))
    assert torch.allclose(jensen_shannon(student, teacher, 0.5), jensen_shannon(teacher, student, 0.5))
    for beta, end in ((1e-6, forward_kl), (1 - 1e-6, reverse_kl)):
        scaled = jensen_shannon(student, teacher, beta) / min(beta, 1 - beta)
        assert torch.allclose(scaled, end(student, teacher), rtol=1e-4)
    p, q = student.exp(), teacher.exp()
    m = 0.3 * q + 0.7 * p
    by_hand = 0.3 * (q * (q / m).log()).sum(-1) + 0.7 * (p * (p / m).log()).sum(-1)
    assert torch.allclose(jensen_shannon(student, teacher, 0.3), by_hand)
    with pytest.raises(ValueError, match="beta"):
        jensen_shannon(student, teacher, 1.5)


def test_p16_sharpened_teacher_is_the_tempered_softmax_and_one_is_the_plain_form() -> None:
    logits = random_logits(4)
    assert torch.allclose(sharpen(log_softmax(logits), 0.6), log_softmax(logits / 0.6))
    assert sharpen(TEACHER, 1.0) is TEACHER
    batch = full_batch(random_logits(0))
    plain, sharp = (full_vocabulary_divergence(0.0, t)(random_logits(0), batch)[0] for t in (1.0, 0.6))
    by_hand = reverse_kl(log_softmax(random_logits(0)), log_softmax(random_logits(1) / 0.6)).sum()
    assert sharp == pytest.approx(float(by_hand))
    assert abs(float(sharp - plain)) > 0.1


def test_p20_missing_logprobs_raise_instead_of_vanishing() -> None:
    logits = random_logits(0)
    missing_sampler = make_batch(TARGETS, torch.zeros(N, dtype=torch.float64), ADVANTAGES, TEACHER)
    for name in ("clipped", "sampled"):
        with pytest.raises(ValueError, match="sampler's log-probabilities are missing"):
            LOSSES[name](logits, missing_sampler)
    for name in ("sampled", "mixed"):
        with pytest.raises(ValueError, match="needs the teacher's log-probabilities"):
            LOSSES[name](logits, make_batch(TARGETS))


def test_p20_a_policy_that_was_certain_is_not_mistaken_for_missing_logprobs() -> None:
    logits = torch.full((N, V), -60.0, dtype=torch.float64)
    logits[:, 2] = 0.0
    batch = make_batch(torch.full((N,), 2), torch.zeros(N, dtype=torch.float64), torch.ones(N, dtype=torch.float64))
    total, _ = clipped_policy_gradient(0.2, 0.2)(logits, batch)
    assert total == pytest.approx(-N)


def test_p15_a_teacher_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="check the vocabularies"):
        LOSSES["reverse"](random_logits(0), make_batch(TARGETS, teacher=TEACHER[:, :-1]))


def test_a_share_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(ValueError, match="forward_share"):
        full_vocabulary_divergence(1.2)
