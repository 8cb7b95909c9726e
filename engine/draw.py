"""One token a row from its logits: inverse CDF in two levels, or the argmax; and each row's own stream of uniforms.

Legend: B rows, V vocabulary, padded with -inf to a multiple of BLOCK; C = V / BLOCK blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16  # fp32 lanes of a 512-bit vector: torch's reductions are fastest on multiples of it

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def padded_size(vocab_size: int) -> int:
    """The smallest multiple of BLOCK that holds the vocabulary."""
    return -(-vocab_size // BLOCK) * BLOCK


def draw_sampled(logits_BV: Tensor, uniform_B2: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (B,) int64 drawn from softmax(logits), and their log-probabilities (B,).

    ``logits_BV`` fp32 is contiguous, V a multiple of BLOCK; ``uniform_B2`` in [0, 1) on a grid of 2^-24. The first
    uniform picks a block by its mass, the second a token within it: the same distribution as one scan of the whole
    CDF, whose running sum is the costly part. A token of probability 0 is never drawn: with u <= 1 - 2^-24 the product
    u * total rounds below the total, so a first entry above it exists, and it adds mass.
    """
    B, V = logits_BV.shape
    probs_BV = torch.softmax(logits_BV, -1)
    cdf_BC = probs_BV.view(B, V // BLOCK, BLOCK).sum(-1).cumsum_(-1)
    block_B1 = torch.searchsorted(cdf_BC, cdf_BC[:, -1:] * uniform_B2[:, :1], right=True)
    flat_B = block_B1.squeeze(1) + torch.arange(B, device=logits_BV.device) * (V // BLOCK)
    inside_BI = probs_BV.view(-1, BLOCK).index_select(0, flat_B)
    cdf_BI = inside_BI.cumsum(-1)
    inside_B1 = torch.searchsorted(cdf_BI, cdf_BI[:, -1:] * uniform_B2[:, 1:], right=True)
    return (block_B1 * BLOCK + inside_B1).squeeze(1), inside_BI.gather(1, inside_B1).squeeze(1).log_()


def draw_greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token ids (B,) int64 and their log-probabilities (B,) at temperature 1."""
    top_B1, token_B1 = logits_BV.max(-1, keepdim=True)
    return token_B1.squeeze(1), (top_B1 - logits_BV.logsumexp(-1, keepdim=True)).squeeze(1)


def uniforms(seed: int, rows_B: NDArray[np.int64], indices_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """(B, 2) uniforms in [0, 1) on a grid of 2^-24: number ``indices_B`` of the stream of ``rows_B``.

    Every row owns a SplitMix64 stream (Steele, Lea and Flood 2014), its seed mixed from ``seed`` and its own number:
    what a row draws depends on neither batch nor neighbours, and no two rows share a stream.
    """
    start_1 = np.array([seed % 2**64], np.uint64)
    stream_B = _mix(_mix(start_1 + _GOLDEN) + rows_B.astype(np.uint64) * _GOLDEN)
    bits_B = _mix(stream_B + (indices_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    pair_B2 = np.stack([bits_B >> np.uint64(40), bits_B & np.uint64(0xFFFFFF)], -1)
    return pair_B2.astype(np.float32) * np.float32(2.0**-24)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function; products wrap modulo 2^64."""
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
