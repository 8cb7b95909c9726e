"""The model is transformers' Qwen3, and a mask or padding changes nothing that it should not."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.reference import to_transformers
from engine.config import ModelConfig
from engine.model import ModelShape, Qwen3
from engine.weights import new_model

VOCAB = 61
GROUPED = ModelConfig(hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48)
PLAIN = GROUPED.model_copy(update={"num_kv_heads": 4, "head_dim": 12})


def make_model(config: ModelConfig = GROUPED) -> Qwen3:
    """Random weights far from uniform logits, every norm weight different."""
    model = new_model(config, VOCAB, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.mul_(8)
    return model


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def logits_of(model: Qwen3, ids_BT: Tensor) -> Tensor:
    positions_BT = torch.arange(ids_BT.shape[1]).expand(ids_BT.shape)
    with torch.no_grad():
        return model.logits(model(ids_BT, positions_BT))


@pytest.mark.parametrize("config", [GROUPED, PLAIN])
def test_logits_and_names_are_those_of_transformers(config: ModelConfig) -> None:
    model = make_model(config)
    reference = to_transformers(model)
    ids_BT = random_ids(3, 40)
    with torch.no_grad():
        expected = reference(ids_BT).logits
    found = logits_of(model, ids_BT)
    assert found.std() > 0.5
    assert (found - expected).abs().max() < 1e-5


def test_a_packed_row_gives_each_segment_its_own_hidden_states() -> None:
    model = make_model()
    lengths = (5, 9, 7)
    ids_BT = random_ids(1, sum(lengths))
    segments_BT = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    visible_BTT = (segments_BT[:, :, None] == segments_BT[:, None]).tril()
    positions_BT = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model(ids_BT, positions_BT, visible_BTT)[0]
        start = 0
        for n in lengths:
            alone = model(ids_BT[:, start : start + n], torch.arange(n)[None])[0]
            assert (packed[start : start + n] - alone).abs().max() < 1e-5
            start += n


def test_chosen_positions_are_those_of_all() -> None:
    model = make_model()
    ids_BT = random_ids(3, 7)
    positions_BT = torch.arange(7).expand(3, 7)
    chosen_N = torch.tensor([20, 0, 8])
    with torch.no_grad():
        every = model(ids_BT, positions_BT).flatten(0, 1)
        chosen = model(ids_BT, positions_BT, chosen_N=chosen_N)
    assert chosen.shape == (3, 32)
    assert (chosen - every[chosen_N]).abs().max() < 1e-5


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    model = make_model()
    ids_BT = random_ids(2, 16)
    padded = ids_BT.clone()
    padded[:, 10:] = 0
    assert (logits_of(model, ids_BT)[:, :10] - logits_of(model, padded)[:, :10]).abs().max() < 1e-5


def test_only_relative_positions_matter() -> None:
    model = make_model()
    ids_BT = random_ids(1, 12)
    with torch.no_grad():
        near = model(ids_BT, torch.arange(12)[None])
        far = model(ids_BT, torch.arange(100, 112)[None])
    assert (near - far).abs().max() < 1e-4


def test_gradients_reach_every_parameter() -> None:
    model = make_model()
    ids_BT = random_ids(2, 9)
    model.logits(model(ids_BT, torch.arange(9).expand(2, 9))).logsumexp(-1).sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


def test_position_beyond_the_context_is_an_error() -> None:
    model = make_model()
    with pytest.raises(IndexError):
        model(random_ids(1, 2), torch.tensor([[0, GROUPED.max_position_embeddings]]))


@pytest.mark.parametrize(("change", "word"), [({"num_kv_heads": 3}, "multiple"), ({"head_dim": 7}, "even")])
def test_a_shape_that_cannot_be_is_refused(change: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ModelShape(**(GROUPED.model_dump() | change), vocab_size=VOCAB)


def test_transformers_is_not_imported() -> None:
    import subprocess
    import sys

    code = "import sys, engine.embedded_sampler, engine.weights; sys.exit('transformers' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
