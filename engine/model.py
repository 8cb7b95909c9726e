"""A lean Qwen3 causal language model: parameter names and maths of transformers' ``Qwen3ForCausalLM``.

Legend: B rows, T tokens, N chosen positions, V vocabulary, D hidden size, H query heads, K key-value heads, E head
size. transformers itself is not imported: that costs each process three seconds.
Source: Qwen3 technical report (arXiv 2505.09388): pre-norm decoder, grouped-query attention with RMS-normed queries and
keys, rotary positions (arXiv 2104.09864), SwiGLU, no biases; here always with tied embeddings.
"""

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from data.config import PositiveInt
from engine.config import ModelConfig


class ModelShape(ModelConfig):
    """A model's shape with its vocabulary: all that decides the parameters' names, sizes and use."""

    vocab_size: PositiveInt
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "ModelShape":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: rotary positions turn pairs of components")
        return self


class Qwen3(nn.Module):
    """``forward`` gives hidden states and ``logits`` reads them out, so that a loss can skip untrained positions."""

    rope_T2E: Tensor

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        self.register_buffer("rope_T2E", rope_table(shape), persistent=False)

    def forward(
        self,
        token_ids_BT: Tensor,
        position_ids_BT: Tensor,
        visible_BTT: Tensor | None = None,
        chosen_N: Tensor | None = None,
    ) -> Tensor:
        """Final-normed hidden states (B, T, D), fp32; with ``chosen_N``, those at these flat positions only (N, D).

        ``token_ids_BT`` and ``position_ids_BT`` are int64; positions stay below ``max_position_embeddings`` (else
        IndexError). Without ``visible_BTT`` every row is one causal sequence, so that padding on the right needs no
        mask; with it (bool), position i attends to the positions j with ``visible_BTT[b, i, j]``, one at least.
        """
        mask_B1TT = None
        if visible_BTT is not None:  # additive, made once for all layers
            mask_B1TT = self.rope_T2E.new_zeros(visible_BTT.shape).masked_fill_(~visible_BTT, float("-inf"))[:, None]
        rope_BT2E = self.rope_T2E[position_ids_BT]
        hidden_BTD = self.model.embed_tokens(token_ids_BT)
        for layer in self.model.layers[:-1]:
            hidden_BTD = layer(hidden_BTD, rope_BT2E, mask_B1TT)
        last: Tensor = self.model.norm(self.model.layers[-1](hidden_BTD, rope_BT2E, mask_B1TT, chosen_N))
        return last

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Next-token logits (N, V) of final-normed hidden states (N, D)."""
        return linear(hidden_ND, self.model.embed_tokens.weight)


def rope_table(shape: ModelShape) -> Tensor:
    """(max_position_embeddings, 2, head_dim) fp32: cosines, then sines with the first half negated.

    Angles are position x theta^(-2i/E) for the pair (i, i + E/2), so that
    rotated = x * table[:, 0] + roll(x, E/2) * table[:, 1].
    """
    E = shape.head_dim
    frequency_E = 1.0 / (shape.rope_theta ** (torch.arange(0, E, 2, dtype=torch.float32) / E))
    angle_TE = torch.arange(shape.max_position_embeddings, dtype=torch.float32)[:, None] * frequency_E
    cos_TE, sin_TE = angle_TE.cos(), angle_TE.sin()
    return torch.stack([torch.cat([cos_TE, cos_TE], -1), torch.cat([-sin_TE, sin_TE], -1)], 1)


class _Decoder(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.input_layernorm = _RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = _MLP(shape)

    def forward(
        self, hidden_BTD: Tensor, rope_BT2E: Tensor, mask_B1TT: Tensor | None, chosen_N: Tensor | None = None
    ) -> Tensor:
        hidden: Tensor = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rope_BT2E, mask_B1TT)
        if chosen_N is not None:  # what follows mixes no positions: the others need not be computed
            hidden = hidden.flatten(0, 1).index_select(0, chosen_N)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        D, E = shape.hidden_size, shape.head_dim
        self.heads = (shape.num_heads, shape.num_kv_heads, E)
        self.q_proj = nn.Linear(D, shape.num_heads * E, bias=False)
        self.k_proj = nn.Linear(D, shape.num_kv_heads * E, bias=False)
        self.v_proj = nn.Linear(D, shape.num_kv_heads * E, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * E, D, bias=False)
        self.q_norm = _RMSNorm(E, shape.rms_norm_eps)
        self.k_norm = _RMSNorm(E, shape.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope_BT2E: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        B, T, _ = x_BTD.shape
        H, K, E = self.heads
        q_BTHE = _rotate(self.q_norm(self.q_proj(x_BTD).view(B, T, H, E)), rope_BT2E)
        k_BTKE = _rotate(self.k_norm(self.k_proj(x_BTD).view(B, T, K, E)), rope_BT2E)
        v_BTKE = self.v_proj(x_BTD).view(B, T, K, E)
        out_BHTE = scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            attn_mask=mask_B1TT,
            is_causal=mask_B1TT is None,
            enable_gqa=H != K,
        )
        return linear(out_BHTE.transpose(1, 2).reshape(B, T, H * E), self.o_proj.weight)


class _MLP(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return linear(silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD), self.down_proj.weight)


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


def _rotate(x_BTHE: Tensor, rope_BT2E: Tensor) -> Tensor:
    cos_BT1E, sin_BT1E = rope_BT2E[:, :, :1], rope_BT2E[:, :, 1:]
    return x_BTHE * cos_BT1E + x_BTHE.roll(x_BTHE.shape[-1] // 2, -1) * sin_BT1E
