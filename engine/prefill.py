"""Prompts through the packed weights at once: their keys and values, and the hidden state after each.

Legend: L layers, R prompts, P tokens of the longest, N = R*P tokens, H query heads, K key-value heads, C = H + K,
E head size, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from engine.packed_weights import PackedWeights, as_complex

TOKENS_AT_ONCE = 1024  # keeps a pass's activations in the cache of a core


@dataclass(frozen=True, slots=True)
class Prompts:
    """Keys (L, R, K, E, P), values (L, R, K, P, E) and lengths (R,) of prompts, zero right of a prompt's end.

    P may be above the longest prompt: see ``PackedWeights.min_keys``.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor

    def select(self, index: Tensor) -> "Prompts":
        """The prompts ``index`` (R',), which may repeat; these very ones, not copied, where it changes nothing."""
        if torch.equal(index, torch.arange(self.lengths.numel())):
            return self
        return Prompts(
            self.k.index_select(1, index), self.v.index_select(1, index), self.lengths.index_select(0, index)
        )


def prefill(weights: PackedWeights, prompts: Sequence[Sequence[int]]) -> tuple[Prompts, Tensor]:
    """The prompts' cache and the hidden states (R, D) after each one's last token."""
    shape, R, P = weights.shape, len(prompts), max(weights.min_keys, *map(len, prompts))
    K, E = shape.num_kv_heads, shape.head_dim
    cache = Prompts(
        k=torch.zeros(shape.num_layers, R, K, E, P),
        v=torch.zeros(shape.num_layers, R, K, P, E),
        lengths=torch.tensor([len(p) for p in prompts]),
    )
    hidden_RD = torch.empty(R, shape.hidden_size)
    start = 0
    while start < R:
        longest, end = len(prompts[start]), start + 1
        while end < R and max(longest, len(prompts[end])) * (end + 1 - start) <= TOKENS_AT_ONCE:
            longest, end = max(longest, len(prompts[end])), end + 1
        ids = torch.tensor([[*p, *([0] * (longest - len(p)))] for p in prompts[start:end]])
        part = Prompts(
            cache.k[:, start:end, :, :, :longest], cache.v[:, start:end, :, :longest], cache.lengths[start:end]
        )
        hidden_RD[start:end] = _fill(weights, ids, part)
        start = end
    return cache, hidden_RD


def _fill(weights: PackedWeights, ids_RP: Tensor, cache: Prompts) -> Tensor:
    """Fills the cache; the last tokens' hidden states (R, D). Causal attention never sees the padding on the right."""
    shape, (R, P) = weights.shape, ids_RP.shape
    H, K, E, N = shape.num_heads, shape.num_kv_heads, shape.head_dim, R * P
    hidden_ND = weights.embedding_VD.index_select(0, ids_RP.reshape(-1))
    qk_NCE = torch.empty(N, H + K, E)
    qk_RCPE = qk_NCE.view(R, P, H + K, E).transpose(1, 2)
    q_RHPE, k_RKPE = qk_RCPE[:, :H], qk_RCPE[:, H:]
    last_R = torch.arange(0, N, P) + cache.lengths - 1
    for index, layer in enumerate(weights.layers):
        qkv_NCE = torch.mm(weights.normalized(hidden_ND), layer.qkv).view(N, H + 2 * K, E)
        v_RKPE = qkv_NCE[:, H + K :].view(R, P, K, E).transpose(1, 2)
        weights.normalize_heads(qkv_NCE[:, : H + K], layer, qk_NCE)
        as_complex(qk_NCE).view(R, P, H + K, E // 2).mul_(weights.rope_TE[:P, None])
        cache.k[index].copy_(k_RKPE.transpose(2, 3))
        cache.v[index].copy_(v_RKPE)
        mixed_RHPE = scaled_dot_product_attention(q_RHPE, k_RKPE, v_RKPE, is_causal=True, scale=1.0, enable_gqa=H != K)
        mixed_ND = mixed_RHPE.transpose(1, 2).reshape(N, H * E)
        if index == shape.num_layers - 1:
            hidden_ND, mixed_ND = hidden_ND.index_select(0, last_R), mixed_ND.index_select(0, last_R)
        hidden_ND.addmm_(mixed_ND, layer.out)
        gate_NI, up_NI = torch.mm(weights.normalized(hidden_ND), layer.gate_up).chunk(2, -1)
        hidden_ND.addmm_(silu(gate_NI, inplace=True).mul_(up_NI), layer.down)
    return hidden_ND
