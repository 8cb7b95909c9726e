"""Draws follow the softmax, never take an impossible token, and rows have streams of their own."""

import numpy as np
import torch

from engine.draw import BLOCK, draw_greedy, draw_sampled, padded_size, uniforms

LARGEST_UNIFORM = 1.0 - 2.0**-24


def padded(logits_BV: torch.Tensor) -> torch.Tensor:
    more = padded_size(logits_BV.shape[1]) - logits_BV.shape[1]
    return torch.nn.functional.pad(logits_BV, (0, more), value=-torch.inf)


def test_frequencies_follow_the_softmax() -> None:
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 1.5
    N = 50_000
    uniform_B2 = torch.from_numpy(uniforms(5, np.arange(N), np.zeros((1, N), np.int64))[0])
    tokens, logprobs = draw_sampled(padded(logits_V.expand(N, 40)), uniform_B2)
    expected = torch.softmax(logits_V.double(), 0) * N
    chi_square = ((torch.bincount(tokens, minlength=40) - expected) ** 2 / expected).sum()
    assert chi_square < 76.1  # 0.9997 quantile of chi-square with 39 degrees of freedom
    assert torch.allclose(logprobs, torch.log_softmax(logits_V, 0)[tokens], atol=1e-6)


def test_the_extreme_uniforms_take_the_first_and_last_possible_token() -> None:
    logits_V = torch.full((50,), -torch.inf)
    logits_V[[3, 17, 18, 33]] = torch.tensor([0.1, -1.0, -30.0, 2.0])
    rows = padded(logits_V[None])
    # masses of the blocks: 1.11, 0.37, 7.39 of 8.86; token 18's share of its block is below the grid
    for block, token, expected in [
        (0.0, 0.0, 3),
        (0.12, 0.9, 3),
        (0.15, LARGEST_UNIFORM, 17),
        (LARGEST_UNIFORM, 1e-3, 33),
    ]:
        assert draw_sampled(rows, torch.tensor([[block, token]]))[0].tolist() == [expected]


def test_an_impossible_token_is_never_drawn_whatever_the_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = torch.randn(4096, 37, generator=generator) * 8
    impossible = torch.rand(4096, 37, generator=generator) < 0.6
    impossible[:, 5] = False
    logits_BV.masked_fill_(impossible, -torch.inf)
    for uniform in (0.0, 0.5, LARGEST_UNIFORM):
        tokens, logprobs = draw_sampled(padded(logits_BV), torch.full((4096, 2), uniform))
        assert not impossible.gather(1, tokens[:, None]).any()
        assert logprobs.isfinite().all()


def test_greedy_takes_the_first_maximum_with_its_log_probability() -> None:
    logits_BV = torch.randn(200, 45, generator=torch.Generator().manual_seed(2)).round()  # many equal maxima
    tokens, logprobs = draw_greedy(padded(logits_BV))
    assert tokens.tolist() == [row.index(max(row)) for row in logits_BV.tolist()]
    assert torch.allclose(logprobs, torch.log_softmax(logits_BV, -1).amax(-1), atol=1e-6)


def test_uniforms_are_uniform_and_streams_differ() -> None:
    values = uniforms(9, np.arange(300), np.arange(200)[:, None] + np.zeros((1, 300), np.int64))
    assert values.shape == (200, 300, 2)
    assert values.min() >= 0.0
    assert values.max() <= LARGEST_UNIFORM
    counts = np.histogram(values, 64, (0, 1))[0]
    expected = values.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110.0  # 0.9997 quantile, 63 degrees of freedom
    flat = values[..., 0]
    assert len(np.unique(flat)) > 0.99 * flat.size
    assert abs(np.corrcoef(flat[:, 0], flat[:, 1])[0, 1]) < 0.25
    assert abs(np.corrcoef(flat[:-1].ravel(), flat[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(values[..., 0].ravel(), values[..., 1].ravel())[0, 1]) < 0.02


def test_an_entry_depends_on_seed_row_and_index_alone() -> None:
    rows = np.array([7, 2, 9])
    together = uniforms(1, rows, np.array([[4, 4, 4], [5, 5, 5]]))
    assert np.array_equal(together[1, 2], uniforms(1, np.array([9]), np.array([[5]]))[0, 0])
    assert not np.array_equal(together, uniforms(2, rows, np.array([[4, 4, 4], [5, 5, 5]])))


def test_sizes_are_padded_to_whole_blocks() -> None:
    assert [padded_size(n) for n in (1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, 2 * BLOCK]
