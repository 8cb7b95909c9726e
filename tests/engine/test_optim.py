"""Optimizers: Muon against a singular value decomposition, schedules by hand, clipping by the joint norm."""

import pytest
import torch
from torch import nn

from engine.config import ModelConfig, OptimizerConfig
from engine.optim import Muon, Optimizer, clip_gradients, learning_rate_factor, orthogonalise
from engine.weights import new_model

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)


def test_orthogonalise_brings_singular_values_near_one_and_keeps_singular_vectors() -> None:
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    U, _, Vh = torch.linalg.svd(matrices, full_matrices=False)
    spectrum = U.mT @ orthogonalise(matrices) @ Vh.mT
    values = spectrum.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < values.min() < values.max() < 1.25
    assert (spectrum - torch.diag_embed(values)).abs().max() < 1e-4


def test_muon_update_has_the_root_mean_square_of_adamw_for_every_shape() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"square": (16, 16), "wide": (16, 48), "tall": (48, 16)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    Muon(parameters, weight_decay=0.0).step(lr=0.1)
    for parameter in parameters.values():
        assert parameter.detach().square().mean().sqrt() == pytest.approx(0.1 * 0.2, rel=0.2)
        assert (parameter.detach() * parameter.grad).sum() < 0  # downhill


def test_muon_treats_a_matrix_and_its_transpose_alike_and_batches_without_mixing() -> None:
    gradients = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(2))
    together = {name: nn.Parameter(torch.zeros(12, 20)) for name in "ab"}
    transposed = nn.Parameter(torch.zeros(20, 12))
    alone, flipped = Muon(together, 0.0), Muon({"t": transposed}, 0.0)
    for _ in range(3):
        together["a"].grad, together["b"].grad = gradients[0].clone(), gradients[1].clone()
        transposed.grad = gradients[1].T.clone()
        alone.step(0.1)
        flipped.step(0.1)
    assert torch.allclose(together["b"], transposed.T, atol=1e-6)
    assert not torch.allclose(together["a"], together["b"], atol=1e-2)


def test_muon_decays_weights_apart_from_the_gradient() -> None:
    parameter = nn.Parameter(torch.ones(4, 6))
    parameter.grad = torch.zeros(4, 6)
    Muon({"w": parameter}, weight_decay=0.5).step(lr=0.1)
    assert torch.allclose(parameter, torch.full((4, 6), 0.95))


def test_muon_needs_every_gradient() -> None:
    with pytest.raises(ValueError, match="w has no gradient"):
        Muon({"w": nn.Parameter(torch.ones(4, 6))}, 0.0).step(0.1)


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = new_model(SHAPE, 20, 0)
    optimizer = Optimizer(model, OptimizerConfig(name="muon", lr=1e-2, adam_lr=1e-3), 10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0)
    muon = {key.removeprefix("muon/") for key in optimizer.state() if key.startswith("muon/")}
    adam = {key.split("/")[1] for key in optimizer.state() if key.startswith("adam/")}
    assert muon | adam == {name for name, _ in model.named_parameters()}
    assert muon == {name for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
    assert "model.embed_tokens.weight" in adam


def test_adamw_first_step_is_the_learning_rate_against_the_sign() -> None:
    model = new_model(SHAPE, 20, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    Optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1), 10).step(0)
    for name, parameter in model.named_parameters():
        kept = before[name] * (1 - 1e-2 * 0.1 if parameter.ndim > 1 else 1.0)
        assert torch.allclose(parameter, kept - 1e-2, atol=1e-6)


def test_learning_rate_warms_up_then_stays_or_falls_to_zero() -> None:
    flat = OptimizerConfig(lr=1.0, warmup_steps=3)
    falling = OptimizerConfig(lr=1.0, warmup_steps=2, decay="linear")
    assert [learning_rate_factor(flat, s, 6) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [learning_rate_factor(falling, s, 6) for s in range(7)] == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0]
    )


def test_the_schedule_reaches_both_optimizers() -> None:
    config = OptimizerConfig(name="muon", lr=1e-2, adam_lr=1e-2, decay="linear")
    model = new_model(SHAPE, 20, 0)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    Optimizer(model, config, num_steps=10).step(10)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_clipping_scales_the_joint_norm_and_only_when_above() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, 10.0) == pytest.approx(5.0)
    assert parameters[1].grad.tolist() == [4.0]
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.0])
    assert parameters[1].grad.tolist() == pytest.approx([0.8])
