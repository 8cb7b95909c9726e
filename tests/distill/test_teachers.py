"""Teachers: each sample is scored by its own, all of them are there, and their word is their model's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from data.types import Sample
from distill.teachers import Teachers
from engine.config import ModelConfig
from engine.model import Qwen3
from engine.weights import load_model, new_model, save_model

SHAPE = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)
CELLS = ("coding/low", "general/low", "general/max")
VOCAB = 320


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, corpus_path: Path) -> dict[str, Path]:
    """Three teachers of random weights, far from each other."""
    paths = {cell: tmp_path_factory.mktemp("teachers") / cell for cell in CELLS}
    for seed, path in enumerate(paths.values()):
        model = new_model(SHAPE, VOCAB, seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
        save_model(model, path, tokenizer_from=corpus_path)
    return paths


@pytest.fixture(scope="module")
def teachers(folders: dict[str, Path]) -> Teachers:
    return Teachers(folders, CELLS, VOCAB, tokens_per_micro_batch=64)


def samples_of(cells: Sequence[str], seed: int = 0) -> list[Sample]:
    """Samples of several lengths, some with a prompt in common, with untrained stretches inside."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 5).tolist()
    samples = []
    for number, cell in enumerate(cells):
        length = int(rng.integers(8, 20))
        ids = rng.integers(0, VOCAB, length).tolist()
        if number % 2:
            ids[:5] = prompt
        mask = tuple(t >= 5 and t % 6 != 0 for t in range(length))
        zeros = (0.0,) * length
        samples.append(Sample(tuple(ids), mask, zeros, zeros, *cell.split("/")))
    return samples


def forward(model: Qwen3, sample: Sample) -> np.ndarray:
    """The plain forward's log-distributions at the trained tokens: row t - 1 speaks of token t."""
    ids = torch.tensor(sample.token_ids_T)
    with torch.no_grad():
        logprobs_TV = model.logits(model(ids[None], torch.arange(len(ids))[None])[0]).log_softmax(-1)
    return logprobs_TV[[t - 1 for t, on in enumerate(sample.loss_mask_T) if on]].numpy()


def test_p21_every_sample_is_scored_by_exactly_its_own_teacher(teachers: Teachers, folders: dict[str, Path]) -> None:
    models = {cell: load_model(folder) for cell, folder in folders.items()}
    cells = [CELLS[i] for i in np.random.default_rng(1).integers(0, 3, 30)]
    samples = samples_of(cells)
    for cell, before, after in zip(cells, samples, teachers.score(samples), strict=True):
        assert after.teacher == cell
        assert after.token_ids_T == before.token_ids_T
        assert after.teacher_logprobs_NV is not None
        assert after.teacher_logprobs_NV.shape == (sum(before.loss_mask_T), VOCAB)
        distances = {c: np.abs(forward(model, before) - after.teacher_logprobs_NV).max() for c, model in models.items()}
        assert distances.pop(cell) < 1e-5
        assert min(distances.values()) > 0.5


def test_a_score_depends_on_the_sample_alone(teachers: Teachers) -> None:
    samples = samples_of([CELLS[i % 3] for i in range(12)])
    together = teachers.score(samples)
    for sample, scored in zip(samples, together, strict=True):
        (alone,) = teachers.score([sample])
        assert np.abs(alone.teacher_logprobs_NV - scored.teacher_logprobs_NV).max() < 1e-5
    assert [s.teacher for s in teachers.score(samples[::-1])] == [s.teacher for s in together][::-1]


def test_scores_are_distributions_in_fp32_without_a_gradient(teachers: Teachers) -> None:
    (scored,) = teachers.score(samples_of(["general/max"]))
    assert scored.teacher_logprobs_NV.dtype == np.float32
    assert np.exp(scored.teacher_logprobs_NV).sum(-1) == pytest.approx(1.0, abs=1e-5)


def test_nothing_else_of_a_sample_is_touched(teachers: Teachers) -> None:
    (before,) = samples_of(["general/low"])
    (after,) = teachers.score([before])
    assert before.teacher is None
    for name in ("loss_mask_T", "sampler_logprobs_T", "advantages_T", "domain", "effort"):
        assert getattr(after, name) == getattr(before, name)


def test_p21_a_missing_teacher_is_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"no teacher for \['research/low'\]; the merge has \['coding/low', 'general"):
        Teachers(folders, (*CELLS, "research/low"), VOCAB, 64)


def test_p21_a_sample_of_an_unknown_cell_is_refused_by_name(teachers: Teachers) -> None:
    with pytest.raises(ValueError, match=r"no teacher for samples of \['coding/max'\]; there are \['coding/low'"):
        teachers.score(samples_of(["coding/low", "coding/max"]))


def test_a_teacher_that_the_merge_does_not_name_scores_nothing(folders: dict[str, Path]) -> None:
    teachers = Teachers(folders, CELLS[:1], VOCAB, 64)
    with pytest.raises(ValueError, match="no teacher for samples of"):
        teachers.score(samples_of(["general/low"]))


def test_p15_another_vocabulary_is_refused_naming_the_teacher(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"teacher coding/low has 320 tokens, the student 321"):
        Teachers(folders, CELLS, VOCAB + 1, 64)
