"""One token a row from its logits, sampled or greedy, and each row's own stream of uniforms.

Legend: B rows, V vocabulary, padded with -inf to a multiple of BLOCK, C = V / BLOCK blocks of I = BLOCK tokens, S
steps.

A scan of a whole row (running sum, argmax) is slow in torch; a block's sum or maximum is not, so both work in two
levels: first the block, then the token within it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16  # fp32 lanes of a 512-bit vector: torch's reductions are fastest on whole vectors

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def padded_size(size: int) -> int:
    """The smallest multiple of BLOCK that is not below ``size``."""
    return -(-size // BLOCK) * BLOCK


def draw_sampled(logits_BV: Tensor, uniform_B2: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (B,) int64 drawn from softmax(logits), and their log-probabilities (B,).

    ``logits_BV`` fp32 is contiguous, V a multiple of BLOCK; ``uniform_B2`` in [0, 1) on a grid of 2^-24. The first
    uniform picks a block by its mass, the second a token by its share of the block. A token of probability 0 is never
    drawn: u <= 1 - 2^-24, so u * total rounds below the total, and the first entry of the CDF above it adds mass.
    """
    B, V = logits_BV.shape
    probs_BV = torch.softmax(logits_BV, -1)
    probs_NI = probs_BV.view(-1, BLOCK)
    cdf_BC = torch.mv(probs_NI, torch.ones(BLOCK)).view(B, V // BLOCK).cumsum_(-1)
    block_B1 = torch.searchsorted(cdf_BC, cdf_BC[:, -1:] * uniform_B2[:, :1], right=True)
    inside_BI = _block(probs_NI, block_B1)
    cdf_BI = inside_BI.cumsum(-1)
    inside_B1 = torch.searchsorted(cdf_BI, cdf_BI[:, -1:] * uniform_B2[:, 1:], right=True)
    return (block_B1 * BLOCK + inside_B1).squeeze(1), inside_BI.gather(1, inside_B1).squeeze(1).log_()


def draw_greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token ids (B,) int64, the first of equals, and their log-probabilities (B,) at temperature 1."""
    B, V = logits_BV.shape
    block_B1 = logits_BV.view(B, V // BLOCK, BLOCK).amax(-1).argmax(-1, keepdim=True)
    inside_B1 = _block(logits_BV.view(-1, BLOCK), block_B1).argmax(-1, keepdim=True)
    token_B1 = block_B1 * BLOCK + inside_B1
    return token_B1.squeeze(1), torch.softmax(logits_BV, -1).gather(1, token_B1).squeeze(1).log_()


def uniforms(seed: int, rows_B: NDArray[np.int64], indices_SB: NDArray[np.int64]) -> NDArray[np.float32]:
    """(S, B, 2) uniforms in [0, 1) on a grid of 2^-24: the entries ``indices_SB`` of the streams ``rows_B``.

    Every row owns a SplitMix64 stream (Steele, Lea and Flood 2014), its seed mixed from ``seed`` and its own number:
    what a row draws depends on neither batch nor neighbours, and no two rows share a stream.
    """
    start_1 = np.array([seed % 2**64], np.uint64)
    stream_B = _mix(_mix(start_1 + _GOLDEN) + rows_B.astype(np.uint64) * _GOLDEN)
    bits_SB = _mix(stream_B + (indices_SB.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    pair_SB2 = np.stack([bits_SB >> np.uint64(40), bits_SB & np.uint64(0xFFFFFF)], -1)
    return pair_SB2.astype(np.float32) * np.float32(2.0**-24)


def _block(values_NI: Tensor, block_B1: Tensor) -> Tensor:
    """Block ``block_B1`` of every row, (B, I), from all rows' blocks."""
    B = len(block_B1)
    first_B = torch.arange(0, len(values_NI), len(values_NI) // B)
    return values_NI.index_select(0, block_B1.squeeze(1) + first_B)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function; products wrap modulo 2^64."""
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
