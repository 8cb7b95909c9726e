"""A frozen copy of a model's weights, rewritten once so that a decode step takes few operations.

Legend: N rows, D hidden size, H query heads, K key-value heads, E head size, I MLP size, V vocabulary padded to a
multiple of draw.BLOCK, T positions.

The function is the model's own; the rewriting changes rounding only. Norm weights and the square root of the size go
into the next matrix, so that a norm is one quotient; q, k, v and gate, up are fused; the attention's scale goes into
the query norm; and each head's components are reordered so that a rotary pair lies side by side and one complex
product turns it (dot products of queries with keys do not see the order).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.draw import padded_size
from engine.model import Qwen3

SMALLEST_PRODUCT = 400  # torch.bmm sends matrices with fewer multiplications to a slow loop


@dataclass(frozen=True, slots=True)
class PackedLayer:
    qkv: Tensor  # (D, (H+2K)E)
    qk_norm: Tensor  # (H+K, E)
    out: Tensor  # (H*E, D)
    gate_up: Tensor  # (D, 2I)
    down: Tensor  # (I, D)


class PackedWeights:
    """Use it under ``torch.inference_mode``."""

    @torch.inference_mode()
    def __init__(self, model: Qwen3):
        shape = self.shape = model.shape
        D, E, eps = shape.hidden_size, shape.head_dim, shape.rms_norm_eps
        state: Mapping[str, Tensor] = model.state_dict()
        self.layers = tuple(_pack(state, i, model) for i in range(shape.num_layers))
        self.embedding_VD = state["model.embed_tokens.weight"].clone()
        head_VD = self.embedding_VD * (state["model.norm.weight"] * D**0.5)
        self.head_DV = torch.zeros(D, padded_size(shape.vocab_size))
        self.head_DV[:, : shape.vocab_size] = head_VD.t()
        self.rope_TE = torch.complex(model.rope_T2E[:, 0, : E // 2], model.rope_T2E[:, 1, E // 2 :])
        self.num_groups = shape.num_heads // shape.num_kv_heads
        self.min_keys = -(-SMALLEST_PRODUCT // (self.num_groups * E))  # that a row's queries should meet in one product
        self.hidden_eps = torch.tensor((D * eps) ** 0.5)
        self.head_eps = E * eps

    def normalize(self, hidden_ND: Tensor, norm_N1: Tensor, out_ND: Tensor) -> None:
        """Each row over the root of its sum of squares + D*eps: the RMS norm but for the factor in the next matrix."""
        torch.linalg.vector_norm(hidden_ND, dim=-1, keepdim=True, out=norm_N1)
        torch.hypot(norm_N1, self.hidden_eps, out=norm_N1)
        torch.div(hidden_ND, norm_N1, out=out_ND)

    def normalized(self, hidden_ND: Tensor) -> Tensor:
        """``normalize`` into a new tensor."""
        out_ND = torch.empty_like(hidden_ND)
        self.normalize(hidden_ND, hidden_ND.new_empty(len(hidden_ND), 1), out_ND)
        return out_ND

    def normalize_heads(self, qk_NCE: Tensor, layer: PackedLayer, out_NCE: Tensor) -> None:
        """Queries and keys (C = H+K heads) normed, their norms' weights applied."""
        scale_NC1 = torch.mul(qk_NCE, qk_NCE, out=out_NCE).sum(-1, keepdim=True).add_(self.head_eps).rsqrt_()
        torch.mul(qk_NCE, scale_NC1, out=out_NCE).mul_(layer.qk_norm)

    def logits(self, hidden_ND: Tensor, temperature: float) -> Tensor:
        """(N, V) over ``temperature``, -inf where V is padding."""
        normed_ND = self.normalized(hidden_ND)
        if temperature != 1.0:
            normed_ND /= temperature
        logits_NV = torch.mm(normed_ND, self.head_DV)
        logits_NV[:, self.shape.vocab_size :] = -torch.inf
        return logits_NV


def as_complex(x: Tensor) -> Tensor:
    """A view (..., E/2) of (..., E): neighbours are real and imaginary part."""
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


def _pack(state: Mapping[str, Tensor], index: int, model: Qwen3) -> PackedLayer:
    def of(name: str) -> Tensor:
        return state[f"model.layers.{index}.{name}.weight"]

    D, H, K, E = model.shape.hidden_size, model.shape.num_heads, model.shape.num_kv_heads, model.shape.head_dim
    order_E = torch.arange(E).view(2, E // 2).t().reshape(-1)
    qk = torch.cat([of("self_attn.q_proj"), of("self_attn.k_proj")]).view(H + K, E, D)[:, order_E].flatten(0, 1)
    qkv = torch.cat([qk, of("self_attn.v_proj")]) * (of("input_layernorm") * D**0.5)
    q_norm, k_norm = of("self_attn.q_norm")[order_E], of("self_attn.k_norm")[order_E]  # q: sqrt(E) and 1/sqrt(E)
    gate_up = torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]) * (of("post_attention_layernorm") * D**0.5)
    return PackedLayer(
        qkv=qkv.t().contiguous(),
        qk_norm=torch.cat([q_norm.expand(H, E), (k_norm * E**0.5).expand(K, E)]),
        out=of("self_attn.o_proj").t().contiguous(),
        gate_up=gate_up.t().contiguous(),
        down=of("mlp.down_proj").t().contiguous(),
    )
