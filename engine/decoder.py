"""The tensor side of the embedded sampler: packed weights, prefill, and one decode step over rows that share prompts.

Legend: L layers, R groups of rows with one prompt, W rows of a group, B = R*W rows, P prompt tokens, S sampled slots,
K key-value heads, G query heads of one of them (H = K*G), E head size, D hidden size, I MLP size, V padded vocabulary.

A decode step is bound by its GEMMs and by the number of passes over small tensors, so the weights are rewritten once
at load, without changing the function: norm weights folded into the next matrix; q, k, v and gate, up fused, the
attention scale folded into the query norm, and the components of each head reordered so that a rotary pair lies side
by side and one complex product turns queries and keys (dot products do not see the order).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from engine.draw import padded_size
from engine.model import Qwen3

PREFILL_TOKENS = 16384  # padded tokens of one prefill pass: bounds its memory


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Tensor  # (D, (H+2K)E)
    qk_norm: Tensor  # (H+K, E)
    out: Tensor  # (H*E, D)
    gate_up: Tensor  # (D, 2I)
    down: Tensor  # (I, D)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Keys (L, R, K, E, P), values (L, R, K, P, E) and lengths (R,) of prompts, right-padded to P."""

    k: Tensor
    v: Tensor
    lengths: Tensor


class Decoder:
    """A frozen copy of a model's weights, packed for decoding. Call its methods under ``torch.inference_mode``."""

    @torch.inference_mode()
    def __init__(self, model: Qwen3):
        shape = model.shape
        self.shape = shape
        self.num_groups = shape.num_heads // shape.num_kv_heads
        E = shape.head_dim
        order = torch.arange(E).view(2, E // 2).t().reshape(-1)
        state = model.state_dict()
        self._layers = [
            _pack(state, f"model.layers.{i}", shape.num_heads, shape.num_kv_heads, order)
            for i in range(shape.num_layers)
        ]
        self._embedding_VD = state["model.embed_tokens.weight"].clone()
        head_VD = self._embedding_VD * state["model.norm.weight"]
        self._head_DV = torch.zeros(shape.hidden_size, padded_size(shape.vocab_size))
        self._head_DV[:, : shape.vocab_size] = head_VD.t()
        cos_TE, sin_TE = model.rope_T2E[:, 0, : E // 2], model.rope_T2E[:, 1, E // 2 :]
        self._rope_TE = torch.complex(cos_TE, sin_TE)

    def prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Prompts, Tensor]:
        """The prompts' cache and the hidden state (R, D) after each prompt's last token."""
        shape, R, P = self.shape, len(prompts), max(map(len, prompts))
        K, E = shape.num_kv_heads, shape.head_dim
        lengths_R = torch.tensor([len(p) for p in prompts])
        ids_RP = torch.tensor([[*p, *([0] * (P - len(p)))] for p in prompts])
        k_LRKEP = torch.empty(shape.num_layers, R, K, E, P)
        v_LRKPE = torch.empty(shape.num_layers, R, K, P, E)
        hidden_RD = torch.empty(R, shape.hidden_size)
        step = max(1, PREFILL_TOKENS // P)
        for i in range(0, R, step):
            part = slice(i, i + step)
            hidden_RPD = self._prefill(ids_RP[part], k_LRKEP[:, part], v_LRKPE[:, part])
            hidden_RD[part] = hidden_RPD[torch.arange(len(hidden_RPD)), lengths_R[part] - 1]
        return Prompts(k_LRKEP, v_LRKPE, lengths_R), hidden_RD

    def _prefill(self, ids_RP: Tensor, k_LRKEP: Tensor, v_LRKPE: Tensor) -> Tensor:
        shape, (R, P) = self.shape, ids_RP.shape
        H, K, E = shape.num_heads, shape.num_kv_heads, shape.head_dim
        hidden_ND = self._embedding_VD.index_select(0, ids_RP.reshape(-1))
        rope_P1E = self._rope_TE[:P, None]
        for layer, k_RKEP, v_RKPE in zip(self._layers, k_LRKEP, v_LRKPE, strict=True):
            qkv_RPCE = (self._norm(hidden_ND) @ layer.qkv).view(R, P, H + 2 * K, E)
            qk_RPCE = rms_norm(qkv_RPCE[:, :, : H + K], (E,), eps=shape.rms_norm_eps).mul_(layer.qk_norm)
            _as_complex(qk_RPCE).mul_(rope_P1E)
            q, k, v = qk_RPCE[:, :, :H], qk_RPCE[:, :, H:], qkv_RPCE[:, :, H + K :]
            k_RKEP.copy_(k.permute(0, 2, 3, 1))
            v_RKPE.copy_(v.transpose(1, 2))
            mixed_RHPE = scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=1.0, enable_gqa=H != K
            )
            hidden_ND.addmm_(mixed_RHPE.transpose(1, 2).reshape(R * P, H * E), layer.out)
            self._mlp(hidden_ND, layer)
        return hidden_ND.view(R, P, -1)

    def head(self, temperature: float) -> Tensor:
        """The readout (D, V) of logits over ``temperature``."""
        return self._head_DV / temperature

    def logits(self, hidden_BD: Tensor, head_DV: Tensor) -> Tensor:
        """(B, V), -inf where V is padding."""
        logits_BV = self._norm(hidden_BD) @ head_DV
        logits_BV[:, self.shape.vocab_size :] = -torch.inf
        return logits_BV

    def step(self, token_ids_B: Tensor, cache: "DecodeCache") -> Tensor:
        """Append one token to every row of the cache; the hidden states (B, D) after it."""
        shape = self.shape
        H, K, E, G = shape.num_heads, shape.num_kv_heads, shape.head_dim, self.num_groups
        cache.open_slot()
        R, W = cache.num_groups, cache.width
        hidden_BD = self._embedding_VD.index_select(0, token_ids_B)
        rope_RW11E = self._rope_TE.index_select(0, cache.positions_B).view(R, W, 1, 1, E // 2)
        for index, layer in enumerate(self._layers):
            qkv_BCE = (self._norm(hidden_BD) @ layer.qkv).view(-1, H + 2 * K, E)
            qk_BCE = rms_norm(qkv_BCE[:, : H + K], (E,), eps=shape.rms_norm_eps).mul_(layer.qk_norm)
            q_RWKGE = _as_complex(qk_BCE[:, :H]).view(R, W, K, G, E // 2)
            k_RWK1E = _as_complex(qk_BCE[:, H:]).view(R, W, K, 1, E // 2)
            v_RWKE = qkv_BCE[:, H + K :].view(R, W, K, E)
            mixed_BD = cache.attend(index, q_RWKGE, k_RWK1E, v_RWKE, rope_RW11E)
            hidden_BD.addmm_(mixed_BD, layer.out)
            self._mlp(hidden_BD, layer)
        return hidden_BD

    def _mlp(self, hidden_ND: Tensor, layer: _Layer) -> None:
        gate_ND, up_ND = (self._norm(hidden_ND) @ layer.gate_up).chunk(2, -1)
        hidden_ND.addmm_(silu(gate_ND, inplace=True).mul_(up_ND), layer.down)

    def _norm(self, hidden_ND: Tensor) -> Tensor:
        return rms_norm(hidden_ND, hidden_ND.shape[-1:], eps=self.shape.rms_norm_eps)


class DecodeCache:
    """Keys and values of R groups of W rows each: a group's prompt once, every row's sampled tokens apart.

    All rows have taken the same number of steps, so slot s of every row is step s. Rows are ordered (R, W); no row
    looks at another's slots, so that a finished row may run on, even past the context's end, until it is left out.
    """

    def __init__(self, decoder: Decoder, prompts: Prompts, width: int, num_slots: int):
        self._prompts = prompts
        self._num_heads = decoder.num_groups
        self._max_positions = decoder.shape.max_position_embeddings
        self.width = width
        self.length = 0  # S so far
        L, R, K, _, E = prompts.v.shape
        self._k = torch.empty(L, R, K, width, num_slots, E)
        self._v = torch.empty(L, R, K, width, num_slots, E)
        self._prepare()

    @property
    def num_groups(self) -> int:
        return self._prompts.v.shape[1]

    def open_slot(self) -> None:
        """Make room for one more token of every row."""
        self.length += 1
        if self.length > self._k.shape[4]:
            self._k, self._v = (torch.cat([t, torch.empty_like(t)], 4) for t in (self._k, self._v))
        P = self._prompts.k.shape[-1]
        self.positions_B += 1
        if P + self.length > self._max_positions:
            self.positions_B.clamp_(max=self._max_positions - 1)
        if P + self.length > self._scores.shape[-1]:
            self._prepare_scores()
        end = P + self.length
        self._row_scores = self._scores.view(-1, self._num_heads, self._scores.shape[-1])[:, :, P:end]

    def select(self, group_of_R: Tensor, row_of_RW: Tensor) -> None:
        """Regroup: new group r has the prompt of old group ``group_of_R[r]`` and the old rows ``row_of_RW[r]``."""
        K = self._k.shape[2]
        old = self._prompts
        R, W = row_of_RW.shape
        source_RKW = _source(row_of_RW, self.width, K)
        self._k, self._v = (
            t.view(t.shape[0], -1, *t.shape[4:]).index_select(1, source_RKW).view(-1, R, K, W, *t.shape[4:])
            for t in (self._k, self._v)
        )
        self._prompts = Prompts(
            old.k.index_select(1, group_of_R),
            old.v.index_select(1, group_of_R),
            old.lengths.index_select(0, group_of_R),
        )
        self.width = W
        self._prepare()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> Tensor:
        """Turn and store the new keys and values, turn the queries; the mixed values (B, H*E)."""
        R, K, W, S, E = self._k.shape[1:]
        G, P, end = self._num_heads, self._prompts.k.shape[-1], self.length
        torch.mul(q, rope, out=self._q_complex)
        torch.mul(k.squeeze(3), rope.squeeze(3), out=_as_complex(self._k[layer, :, :, :, end - 1]).permute(0, 2, 1, 3))
        self._v[layer, :, :, :, end - 1].copy_(v.transpose(1, 2))
        rows_k = self._k[layer].view(R * K * W, S, E)[:, :end]
        rows_v = self._v[layer].view(R * K * W, S, E)[:, :end]
        q_groups = self._q.view(R * K, W * G, E)
        groups_scores = self._scores.view(R * K, W * G, -1)[:, :, :P]
        torch.bmm(q_groups, self._prompts.k[layer].view(R * K, E, P), out=groups_scores)
        if self._mask is not None:
            self._scores[:, :, :, :P].add_(self._mask)
        torch.bmm(self._q.view(R * K * W, G, E), rows_k.transpose(1, 2), out=self._row_scores)
        probs = torch.softmax(self._scores, -1)
        mixed = torch.bmm(probs.view(R * K, W * G, -1)[:, :, :P], self._prompts.v[layer].view(R * K, P, E))
        rows_mixed = mixed.view(R * K * W, G, E)
        rows_mixed.baddbmm_(probs.view(R * K * W, G, -1)[:, :, P : P + end], rows_v)
        return mixed.view(R, K, W, G * E).transpose(1, 2).reshape(R * W, K * G * E)

    def _prepare(self) -> None:
        _, R, K, W, _, E = self._k.shape
        G, P = self._num_heads, self._prompts.k.shape[-1]
        self._q = torch.empty(R, K, W, G, E)
        self._q_complex = _as_complex(self._q).permute(0, 2, 1, 3, 4)
        lengths_R = self._prompts.lengths
        self.positions_B = lengths_R.repeat_interleave(W) + (self.length - 1)
        self._mask = None
        if bool((lengths_R < P).any()):
            self._mask = torch.zeros(R, 1, 1, P).masked_fill_(
                torch.arange(P) >= lengths_R[:, None, None, None], -torch.inf
            )
        self._prepare_scores()

    def _prepare_scores(self) -> None:
        _, R, K, W, _, _ = self._k.shape
        total = padded_size(self._prompts.k.shape[-1] + self.length)
        self._scores = torch.full((R, K, W * self._num_heads, total), -torch.inf)


def _pack(state: Mapping[str, Tensor], prefix: str, H: int, K: int, order_E: Tensor) -> _Layer:
    def of(name: str) -> Tensor:
        return state[f"{prefix}.{name}.weight"]

    E = len(order_E)
    qk = torch.cat([of("self_attn.q_proj"), of("self_attn.k_proj")]).view(H + K, E, -1)[:, order_E].flatten(0, 1)
    qkv = torch.cat([qk, of("self_attn.v_proj")]) * of("input_layernorm")
    q_norm = of("self_attn.q_norm")[order_E] * E**-0.5
    k_norm = of("self_attn.k_norm")[order_E]
    gate_up = torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]) * of("post_attention_layernorm")
    return _Layer(
        qkv=qkv.t().contiguous(),
        qk_norm=torch.cat([q_norm.expand(H, E), k_norm.expand(K, E)]),
        out=of("self_attn.o_proj").t().contiguous(),
        gate_up=gate_up.t().contiguous(),
        down=of("mlp.down_proj").t().contiguous(),
    )


def _source(row_of_RW: Tensor, old_width: int, K: int) -> Tensor:
    """Flat indices (R*K*W) into the old (R, K, W) order of the rows ``row_of_RW``, numbered in (R, W) order."""
    old_group_RW, old_place_RW = row_of_RW // old_width, row_of_RW % old_width
    head_K = torch.arange(K)
    return ((old_group_RW[:, None] * K + head_K[:, None]) * old_width + old_place_RW[:, None]).reshape(-1)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
