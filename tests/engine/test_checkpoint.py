"""Checkpoints: resume is bit-identical, damage is noticed, the newest good one is used."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data.types import Sample
from engine.checkpoint import load_latest, save_checkpoint
from engine.config import ModelConfig, OptimizerConfig
from engine.losses import cross_entropy
from engine.trainer import EmbeddedTrainer
from engine.weights import new_model

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)
OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2, decay="linear"),
    "muon": OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1, decay="linear"),
}


def make_trainer(name: str = "muon", seed: int = 0) -> EmbeddedTrainer:
    return EmbeddedTrainer(new_model(SHAPE, 20, seed), OPTIMIZERS[name], num_steps=6, tokens_per_micro_batch=40)


def samples_of(step: int) -> list[Sample]:
    rng = np.random.default_rng(step)
    rows = [tuple(rng.integers(0, 20, int(n)).tolist()) for n in rng.integers(4, 12, 8)]
    return [
        Sample(r, (False, *(True,) * (len(r) - 1)), (0.0,) * len(r), (0.0,) * len(r), "general", "low") for r in rows
    ]


def train(trainer: EmbeddedTrainer, until: int) -> list[float]:
    return [trainer.update(samples_of(step), cross_entropy).loss for step in range(trainer.step, until)]


def weights_of(trainer: EmbeddedTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_resume_is_bit_identical_to_an_uninterrupted_run(tmp_path: Path, name: str) -> None:
    whole = make_trainer(name)
    losses = train(whole, 6)
    first = make_trainer(name)
    train(first, 3)
    save_checkpoint(tmp_path, 3, first, {"rows": [1, 2]})
    second = make_trainer(name, seed=1)
    assert load_latest(tmp_path, second) == {"rows": [1, 2]}
    assert second.step == second.policy_version == 3
    assert train(second, 6) == losses[3:]
    assert torch.equal(weights_of(second), weights_of(whole))


def test_saving_does_not_disturb_the_run_and_writes_the_same_bytes_again(tmp_path: Path) -> None:
    quiet, saved = make_trainer(), make_trainer()
    train(quiet, 2)
    train(saved, 1)
    save_checkpoint(tmp_path / "a", 1, saved, {})
    train(saved, 2)
    assert torch.equal(weights_of(quiet), weights_of(saved))
    one = save_checkpoint(tmp_path / "b", 2, quiet, {})
    two = save_checkpoint(tmp_path / "c", 2, saved, {})
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


def test_no_checkpoint_gives_none_and_leaves_the_trainer_alone(tmp_path: Path) -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    assert load_latest(tmp_path / "missing", trainer) is None
    (tmp_path / "unfinished-00000002").mkdir()
    assert load_latest(tmp_path, trainer) is None
    assert torch.equal(weights_of(trainer), before)


def test_the_last_two_are_kept_and_nothing_unfinished(tmp_path: Path) -> None:
    trainer = make_trainer()
    (tmp_path / "unfinished-00000001").mkdir()
    (tmp_path / "unfinished-00000001" / "model.safetensors").write_bytes(b"cut off by a kill")
    for step in (1, 2, 3):
        train(trainer, step)
        save_checkpoint(tmp_path, step, trainer, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "cursor.json", "manifest.json"])
def test_truncated_newest_checkpoint_falls_back_to_the_previous_and_says_so(tmp_path: Path, name: str, damage) -> None:
    trainer = make_trainer()
    for step in (1, 2):
        train(trainer, step)
        folder = save_checkpoint(tmp_path, step, trainer, {"step": step})
    damage(folder / name)
    resumed = make_trainer(seed=1)
    with pytest.warns(UserWarning, match=r"step-00000002 is damaged"):
        assert load_latest(tmp_path, resumed) == {"step": 1}
    assert resumed.step == 1


def test_all_damaged_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, 1)
    cut(save_checkpoint(tmp_path, 1, trainer, {}) / "model.safetensors")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="remove the folder"):
        load_latest(tmp_path, make_trainer())


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("adamw")
    train(trainer, 1)
    save_checkpoint(tmp_path, 1, trainer, {})
    with pytest.raises(ValueError, match="was the recipe changed"):
        load_latest(tmp_path, make_trainer("muon"))
