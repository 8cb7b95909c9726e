"""Micro-batches: alignment by hand, padding that cannot be seen, nothing lost."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.types import Sample
from engine.batches import by_sample, count_loss_tokens, pack
from engine.config import ModelConfig
from engine.trainer import trained_logits
from engine.weights import new_model

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)


def make_sample(tokens, mask, base: float = 0.0) -> Sample:
    n = len(tokens)
    logprobs = tuple(-(base + t) if on else 0.0 for t, on in enumerate(mask))
    advantages = tuple(base + 0.5 * t if on else 0.0 for t, on in enumerate(mask))
    return Sample(tuple(tokens), tuple(bool(m) for m in mask), logprobs[:n], advantages[:n], "general", "low")


HAND = [
    make_sample([7, 8, 9, 1], [0, 0, 1, 1], base=10),
    make_sample([5, 6, 2, 3, 4, 1, 1], [0, 1, 0, 0, 1, 1, 0], base=20),
]


def test_p13_shift_by_hand() -> None:
    (batch,) = pack(HAND, 100)
    assert batch.token_ids_BT.tolist() == [[7, 8, 9, 0, 0], [5, 6, 2, 3, 4]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.segment_ids_BT is None
    assert batch.source_N.tolist() == [1, 2, 5 + 0, 5 + 3, 5 + 4]
    assert batch.target_ids_N.tolist() == [9, 1, 6, 4, 1]
    assert batch.sampler_logprobs_N.tolist() == [-12, -13, -21, -24, -25]
    assert batch.advantages_N.tolist() == [11.0, 11.5, 20.5, 22.0, 22.5]
    assert (batch.sample_ids, batch.counts, batch.num_loss_tokens) == ((0, 1), (2, 3), 5)


def test_p13_first_token_trained_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sample 1: its first token is trained"):
        pack([HAND[0], make_sample([1, 2], [1, 1])], 100)


def test_p14_padding_changes_no_logit() -> None:
    model = new_model(SHAPE, 12, 0)
    rng = np.random.default_rng(0)
    samples = []
    for n in rng.integers(3, 20, 9):
        samples.append(make_sample(rng.integers(0, 12, n).tolist(), [0, 0, *rng.integers(0, 2, n - 3), 1]))
    with torch.no_grad():
        for tokens in (1, 50, 1000):
            batches = pack(samples, tokens)
            rows = dict(by_sample(batches, [trained_logits(model, batch) for batch in batches]))
            assert sorted(rows) == list(range(9))
            for i, sample in enumerate(samples):
                alone = model.logits(
                    model(torch.tensor([sample.token_ids_T]), torch.arange(len(sample.token_ids_T))[None])
                )
                expected = alone[0, [t - 1 for t, on in enumerate(sample.loss_mask_T) if on]]
                assert torch.allclose(rows[i], expected, atol=1e-5)


def test_p8_p13_padding_holds_no_infinities_and_is_never_a_target() -> None:
    batches = pack(HAND, 100)
    for batch in batches:
        for tensor in (batch.sampler_logprobs_N, batch.advantages_N):
            assert torch.isfinite(tensor).all()
        assert len(batch.source_N) == len(batch.target_ids_N) == sum(batch.counts) == 5
        assert batch.source_N.unique().numel() == 5


def test_every_trained_token_comes_once_in_length_sorted_micro_batches_within_the_budget() -> None:
    rng = np.random.default_rng(1)
    samples = [
        make_sample(rng.integers(1, 9, n).tolist(), [0] + [1] * (n - 1), base=i)
        for i, n in enumerate([9, 3, 30, 3, 17, 4])
    ]
    batches = pack(samples, 24)
    assert [batch.sample_ids for batch in batches] == [(1, 3, 5), (0,), (4,), (2,)]
    assert all(batch.token_ids_BT.numel() <= 24 for batch in batches[:-1])
    assert batches[-1].token_ids_BT.shape == (1, 29)
    assert sum(len(batch.target_ids_N) for batch in batches) == count_loss_tokens(samples) == 60
    assert {batch.num_loss_tokens for batch in batches} == {60}
    assert {batch.num_loss_tokens for batch in pack(samples, 24, num_loss_tokens=500)} == {500}


def test_samples_without_a_trained_token_are_left_out() -> None:
    batches = pack([make_sample([1, 2, 3], [0, 0, 0]), HAND[0]], 100)
    assert [batch.sample_ids for batch in batches] == [(1,)]
    assert pack([make_sample([1, 2, 3], [0, 0, 0])], 100) == []


def test_teacher_logprobs_follow_their_tokens() -> None:
    scored = [
        replace(s, teacher_logprobs_NV=np.full((sum(s.loss_mask_T), 4), i, np.float32)) for i, s in enumerate(HAND)
    ]
    (batch,) = pack(scored[::-1], 100)
    assert batch.sample_ids == (1, 0)
    assert batch.teacher_logprobs_NV is not None
    assert batch.teacher_logprobs_NV[:, 0].tolist() == [0, 0, 1, 1, 1]


def test_p20_a_sample_without_its_teachers_logprobs_is_refused() -> None:
    scored = replace(HAND[0], teacher_logprobs_NV=np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"samples \[1\] lack the teacher"):
        pack([scored, HAND[1]], 100)
    with pytest.raises(ValueError, match="sample 0: the teacher scored 3 tokens, but 2 are trained"):
        pack([replace(HAND[0], teacher_logprobs_NV=np.zeros((3, 4), np.float32))], 100)


def test_p20_missing_sampler_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 0: 4 tokens"):
        pack([replace(HAND[0], sampler_logprobs_T=())], 100)


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack(HAND, 0)
