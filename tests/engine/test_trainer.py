"""The trainer: exact gradients whatever the micro-batches, faults stopped before the weights change."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.types import Sample
from engine.batches import count_loss_tokens, pack
from engine.config import ModelConfig, OptimizerConfig
from engine.losses import clipped_policy_gradient, cross_entropy, full_vocabulary_divergence, sampled_token_reverse_kl
from engine.model import Qwen3
from engine.trainer import EmbeddedTrainer, state_logits, trained_logits
from engine.weights import new_model

VOCAB = 40
SHAPE = ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64)
ADAMW = OptimizerConfig(lr=1e-3)


def make_model(seed: int = 0) -> Qwen3:
    model = new_model(SHAPE, VOCAB, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)  # far enough from uniform to matter
    return model


def make_samples(num: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num):
        length, prompt = int(rng.integers(8, 24)), int(rng.integers(2, 6))
        mask = (*(t >= prompt and bool(rng.random() < 0.9) for t in range(length - 1)), True)
        samples.append(
            Sample(
                token_ids_T=tuple(rng.integers(0, VOCAB, length).tolist()),
                loss_mask_T=mask,
                sampler_logprobs_T=tuple(np.where(mask, -rng.random(length) * 3, 0.0).tolist()),
                advantages_T=tuple(np.where(mask, rng.normal(), 0.0).tolist()),
                domain="general",
                effort="low",
            )
        )
    return samples


def on_policy(model: Qwen3, samples: list[Sample]) -> list[Sample]:
    """The samples with the log-probabilities that the model itself gives."""
    scored = []
    for sample in samples:
        with torch.no_grad():
            logprobs = trained_logits(model, pack([sample], 10_000)[0]).log_softmax(-1)
        ids = [t for t, on in enumerate(sample.loss_mask_T) if on]
        values = [0.0] * len(sample.token_ids_T)
        for row, t in enumerate(ids):
            values[t] = float(logprobs[row, sample.token_ids_T[t]])
        scored.append(replace(sample, sampler_logprobs_T=tuple(values), teacher_logprobs_NV=logprobs.numpy()))
    return scored


def gradients_of(model: Qwen3, samples: list[Sample], tokens: int, num_loss_tokens: int | None = None) -> torch.Tensor:
    model.zero_grad()
    for batch in pack(samples, tokens, num_loss_tokens):
        total, _ = clipped_policy_gradient(0.2, 0.28)(state_logits(model, batch), batch)
        (total / batch.num_loss_tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def weights_of(model: Qwen3) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_p7_gradient_is_that_of_one_sample_at_a_time_for_any_micro_batches() -> None:
    model, samples = make_model(), make_samples(24)
    single = sum(gradients_of(model, [s], 10_000, count_loss_tokens(samples)) for s in samples)
    for tokens in (1, 40, 150, 10_000):
        assert torch.allclose(gradients_of(model, samples, tokens), single, rtol=0, atol=1e-6)
    assert single.norm() > 0.05


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_p7_one_two_and_eight_micro_batches_make_the_same_update(name: str) -> None:
    config = OptimizerConfig(name=name, lr=1e-3, eps=1e-5)
    samples = make_samples(24)
    updated = []
    for tokens in (100_000, 280, 64):
        trainer = EmbeddedTrainer(make_model(), config, 10, tokens)
        update = trainer.update(samples, cross_entropy)
        updated.append((weights_of(trainer.model), update.loss, update.grad_norm))
    for weights, loss, grad_norm in updated[1:]:
        assert torch.allclose(weights, updated[0][0], rtol=0, atol=1e-6)
        assert loss == pytest.approx(updated[0][1], abs=1e-6)
        assert grad_norm == pytest.approx(updated[0][2], abs=1e-5)


def test_p7_two_ranks_with_the_global_count_sum_to_one() -> None:
    model, samples = make_model(), make_samples(20)
    total = count_loss_tokens(samples)
    halves = gradients_of(model, samples[:7], 100, total) + gradients_of(model, samples[7:], 100, total)
    assert torch.allclose(halves, gradients_of(model, samples, 100), rtol=0, atol=1e-6)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    updated = []
    threads = torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        try:
            trainer = EmbeddedTrainer(make_model(), ADAMW, 10, 64)
            updates = [trainer.update(make_samples(24, seed), cross_entropy) for seed in range(3)]
            assert torch.get_num_threads() == num_threads
        finally:
            torch.set_num_threads(threads)
        updated.append((weights_of(trainer.model), updates))
    for weights, updates in updated[1:]:
        assert torch.equal(weights, updated[0][0])
        assert updates == updated[0][1]


def test_update_reports_means_over_trained_tokens_and_counts_steps() -> None:
    samples = make_samples(6)
    trainer = EmbeddedTrainer(make_model(), ADAMW, 10, 64)
    with torch.no_grad():
        nll = [
            -trained_logits(trainer.model, batch).log_softmax(-1).gather(1, batch.target_ids_N[:, None])
            for batch in pack(samples, 10_000)
        ]
    update = trainer.update(samples, cross_entropy)
    assert update.loss == pytest.approx(float(torch.cat(nll).mean()), abs=1e-5)
    assert (update.step, update.policy_version, update.num_tokens) == (1, 1, count_loss_tokens(samples))
    assert (trainer.step, trainer.policy_version) == (1, 1)
    assert trainer.update(samples, cross_entropy).loss < update.loss


def test_on_policy_ratio_is_one_nothing_is_clipped_and_sampler_kl_is_zero() -> None:
    model = make_model()
    samples = on_policy(model, make_samples(12))
    update = EmbeddedTrainer(model, ADAMW, 10, 128).update(samples, clipped_policy_gradient(0.2, 0.28))
    assert update.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert update.metrics["clipped"] == 0.0
    assert abs(update.metrics["sampler_kl"]) < 1e-6
    assert 0.0 < update.metrics["entropy"] < np.log(VOCAB)


@pytest.mark.parametrize("loss", [sampled_token_reverse_kl(), full_vocabulary_divergence(0.3)])
def test_student_equal_to_teacher_gets_no_gradient(loss) -> None:
    model = make_model()
    samples = on_policy(model, make_samples(12))
    update = EmbeddedTrainer(model, ADAMW, 10, 128).update(samples, loss)
    assert update.grad_norm < 1e-5
    assert abs(update.metrics["reverse_kl"]) < 1e-6


def test_p9_end_of_sequence_is_trained_although_it_is_the_padding_token() -> None:
    end = 0  # what pack pads with
    samples = [
        Sample((5, 6, 7, end), (False, True, True, True), (0.0,) * 4, (0.0,) * 4, "general", "low"),
        Sample((5, 8, 9, 8, 9, 8, end), (False,) + (True,) * 6, (0.0,) * 7, (0.0,) * 7, "general", "low"),
    ]
    trainer = EmbeddedTrainer(make_model(), OptimizerConfig(lr=1e-2), 100)
    for _ in range(60):
        trainer.update(samples, cross_entropy)
    batch = pack(samples, 10_000)[0]
    with torch.no_grad():
        probs = trained_logits(trainer.model, batch).softmax(-1)
    ends = (batch.target_ids_N == end).nonzero().flatten()
    assert len(ends) == 2
    assert (probs[ends, end] > 0.9).all()


def test_loss_falls_to_memorisation_with_muon() -> None:
    trainer = EmbeddedTrainer(make_model(), OptimizerConfig(name="muon", lr=1e-2, adam_lr=1e-2), 60, 256)
    samples = make_samples(8)
    losses = [trainer.update(samples, cross_entropy).loss for _ in range(60)]
    assert losses[-1] < 0.3 < 3.0 < losses[0]


def test_non_finite_loss_stops_before_the_step_and_names_step_and_metric() -> None:
    trainer = EmbeddedTrainer(make_model(), ADAMW, 10)
    samples = make_samples(4)
    trainer.update(samples, clipped_policy_gradient(0.2, 0.2))
    before = weights_of(trainer.model)
    broken = replace(samples[0], advantages_T=tuple(float("nan") for _ in samples[0].advantages_T))
    with pytest.raises(FloatingPointError, match=r"step 2 .*loss"):
        trainer.update([*samples[1:], broken], clipped_policy_gradient(0.2, 0.2))
    assert torch.equal(weights_of(trainer.model), before)
    assert trainer.step == 1
    assert trainer.update(samples, clipped_policy_gradient(0.2, 0.2)).step == 2


def test_non_finite_gradient_stops_before_the_step() -> None:
    trainer = EmbeddedTrainer(make_model(), ADAMW, 10)
    before = weights_of(trainer.model)

    def root_of_zero(logits_UV, batch):
        return (logits_UV - logits_UV.detach()).abs().sum().sqrt(), {}

    with pytest.raises(FloatingPointError, match=r"step 1 .*grad_norm"):
        trainer.update(make_samples(4), root_of_zero)
    assert torch.equal(weights_of(trainer.model), before)


def test_an_update_without_a_trained_token_is_refused() -> None:
    sample = Sample((1, 2, 3), (False,) * 3, (0.0,) * 3, (0.0,) * 3, "general", "low")
    with pytest.raises(ValueError, match="none of the 2 samples"):
        EmbeddedTrainer(make_model(), ADAMW, 10).update([sample, sample], cross_entropy)
