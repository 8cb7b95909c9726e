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
    assert batch.token_ids_BT.tolist() == [[5, 6, 2, 3, 4, 7, 8, 9]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.visible_BTT is not None
    assert batch.visible_BTT[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]
    assert batch.source_U.tolist() == [0, 3, 4, 6, 7]
    assert batch.state_N.tolist() == [0, 1, 2, 3, 4]
    assert batch.target_ids_N.tolist() == [6, 4, 1, 9, 1]
    assert batch.sampler_logprobs_N.tolist() == [-21, -24, -25, -12, -13]
    assert batch.advantages_N.tolist() == [20.5, 22.0, 22.5, 11.0, 11.5]
    assert (batch.sample_ids, batch.counts, batch.num_loss_tokens) == ((1, 0), (3, 2), 5)


def test_a_common_prefix_stands_once_and_its_states_predict_for_all() -> None:
    samples = [make_sample([4, 5, *end], [0, 0, *(1 for _ in end)]) for end in ([6, 7, 1], [6, 8, 1], [6, 7, 1], [9])]
    (batch,) = pack(samples, 100)
    assert batch.token_ids_BT.tolist() == [[4, 5, 6, 7, 8]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 3]]
    assert batch.visible_BTT is not None
    assert batch.visible_BTT[0, 3:].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert batch.sample_ids == (3, 0, 2, 1)
    assert batch.target_ids_N.tolist() == [9, 6, 7, 1, 6, 7, 1, 6, 8, 1]
    assert batch.source_U[batch.state_N].tolist() == [1, 1, 2, 3, 1, 2, 3, 1, 2, 4]
    assert batch.source_U.tolist() == [1, 2, 3, 4]


def test_rows_of_one_sequence_each_need_no_mask() -> None:
    (batch,) = pack([make_sample([i, *range(99)], [0] + [1] * 99) for i in (1, 2, 3)], 1000)
    assert batch.visible_BTT is not None  # two fit into a row of twice the longest
    (batch, *_) = pack([make_sample([i, *range(99)], [0] + [1] * 99) for i in (1, 2, 3)], 100)
    assert batch.visible_BTT is None


def test_p13_first_token_trained_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sample 1: its first token is trained"):
        pack([HAND[0], make_sample([1, 2], [1, 1])], 100)


def test_p14_padding_and_packing_change_no_logit() -> None:
    model = new_model(SHAPE, 12, 0)
    rng = np.random.default_rng(0)
    samples = []
    for n in rng.integers(3, 20, 30):  # three different tokens: many common prefixes
        samples.append(make_sample(rng.integers(0, 3, n).tolist(), [0, 0, *rng.integers(0, 2, n - 3), 1]))
    with torch.no_grad():
        for tokens in (1, 25, 60, 200, 5000):
            batches = pack(samples, tokens)
            rows = dict(by_sample(batches, [trained_logits(model, batch) for batch in batches]))
            assert sorted(rows) == list(range(30))
            for i, sample in enumerate(samples):
                alone = model.logits(
                    model(torch.tensor([sample.token_ids_T]), torch.arange(len(sample.token_ids_T))[None])
                )
                expected = alone[0, [t - 1 for t, on in enumerate(sample.loss_mask_T) if on]]
                assert torch.allclose(rows[i], expected, atol=1e-5)


def test_p8_p13_padding_holds_no_infinities_sees_itself_and_is_never_a_source() -> None:
    samples = [make_sample([1, 2, 3, *range(3, 3 + n)], [0, 0, 0] + [1] * n) for n in (1, 40, 100)]
    samples += [make_sample([2, 2, 3, *range(3, 3 + n)], [0, 0, 0] + [1] * n) for n in (30, 50)]
    (batch,) = pack(samples, 10_000)
    assert batch.visible_BTT is not None
    assert batch.visible_BTT.any(-1).all()  # a softmax over nothing would be NaN
    padding = batch.visible_BTT.sum(-1) == 1
    assert padding.sum() > len(padding)  # more than the first tokens of the rows
    for row, position in zip(*divmod(batch.source_U.numpy(), batch.token_ids_BT.shape[1]), strict=True):
        assert batch.visible_BTT[row, position].sum() == batch.position_ids_BT[row, position] + 1
    assert all(torch.isfinite(t).all() for t in (batch.sampler_logprobs_N, batch.advantages_N))


def test_every_trained_token_comes_once_in_micro_batches_within_the_budget() -> None:
    rng = np.random.default_rng(1)
    lengths = [9, 3, 30, 3, 17, 4, 12, 5, 5, 8]
    samples = [
        make_sample(rng.integers(1, 4, n).tolist(), [0] + [1] * (n - 1), base=100 * i) for i, n in enumerate(lengths)
    ]
    batches = pack(samples, 24)
    assert len(batches) > 2
    assert [b.token_ids_BT.numel() for b in batches if b.token_ids_BT.numel() > 24] == [29]  # one sample is longer
    found = [value for batch in batches for value in batch.sampler_logprobs_N.tolist()]
    expected = [value for s in samples for value, on in zip(s.sampler_logprobs_T, s.loss_mask_T, strict=True) if on]
    assert sorted(found) == sorted(expected)
    assert count_loss_tokens(samples) == len(found)
    assert {batch.num_loss_tokens for batch in batches} == {len(found)}
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
    assert batch.sample_ids == (0, 1)
    assert batch.teacher_logprobs_NV is not None
    assert batch.teacher_logprobs_NV[:, 0].tolist() == [1, 1, 1, 0, 0]


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
