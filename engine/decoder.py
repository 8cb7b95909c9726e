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
        return hidden_ND.view(R, P, shape.hidden_size)

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
        rope_RW1E = self._rope_TE.index_select(0, cache.positions_B).view(R, W, 1, E // 2)
        for index, layer in enumerate(self._layers):
            qkv_BCE = (self._norm(hidden_BD) @ layer.qkv).view(-1, H + 2 * K, E)
            qk_BCE = rms_norm(qkv_BCE[:, : H + K], (E,), eps=shape.rms_norm_eps).mul_(layer.qk_norm)
            q_RWKGE = _as_complex(qk_BCE[:, :H]).view(R, W, K, G, E // 2)
            k_RWKE = _as_complex(qk_BCE[:, H:]).view(R, W, K, E // 2)
            v_RWKE = qkv_BCE[:, H + K :].view(R, W, K, E)
            mixed_BD = cache.attend(index, q_RWKGE, k_RWKE, v_RWKE, rope_RW1E)
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
    Inside, rows are ordered (R, K, W, G): then a group's queries are one matrix against its prompt, and each row's
    queries one against its own slots.
    """

    def __init__(self, decoder: Decoder, prompts: Prompts, width: int, num_slots: int):
        self._prompts = prompts
        self._num_heads = decoder.num_groups
        self._max_positions = decoder.shape.max_position_embeddings
        self.width = width
        self.length = 0  # slots filled
        L, R, K, _, E = prompts.v.shape
        self._k = torch.zeros(L, R, K, width, self._window(num_slots), E)
        self._v = torch.zeros_like(self._k)
        self._prepare()

    @property
    def num_groups(self) -> int:
        return self._prompts.v.shape[1]

    def open_slot(self) -> None:
        """Make room for one more token of every row."""
        self.length += 1
        if self.length > self._k.shape[4]:
            self._k, self._v = (torch.cat([t, torch.zeros_like(t)], 4) for t in (self._k, self._v))
        if self.length > self._size:
            self._prepare_window()
        P, slot = self._prompts.k.shape[-1], self.length - 1
        self.positions_B += 1
        if P + self.length > self._max_positions:
            self.positions_B.clamp_(max=self._max_positions - 1)
        self._own_scores_filled = self._own_scores[:, :, : self.length]
        self._scores_filled = self._scores.view(*self._own_scores.shape[:2], -1)[:, :, P : P + self.length]
        self._k_slot = _as_complex(self._k[..., slot, :]).transpose(2, 3)
        self._v_slot = self._v[..., slot, :].transpose(2, 3)

    def select(self, group_of_R: Tensor, row_of_RW: Tensor) -> None:
        """Regroup: new group r has the prompt of old group ``group_of_R[r]`` and the old rows ``row_of_RW[r]``."""
        L, _, K, _, S, E = self._k.shape
        old = self._prompts
        R, W = row_of_RW.shape
        source_N = _source(row_of_RW, self.width, K)
        self._k, self._v = (
            t.view(L, -1, S, E).index_select(1, source_N).view(L, R, K, W, S, E) for t in (self._k, self._v)
        )
        self._prompts = Prompts(
            old.k.index_select(1, group_of_R),
            old.v.index_select(1, group_of_R),
            old.lengths.index_select(0, group_of_R),
        )
        self.width = W
        self._prepare()

    def attend(self, layer: int, q_RWKGE: Tensor, k_RWKE: Tensor, v_RWKE: Tensor, rope_RW1E: Tensor) -> Tensor:
        """Turn and store the new keys and values, turn the queries; the mixed values (B, H*E)."""
        torch.mul(q_RWKGE, rope_RW1E.unsqueeze(3), out=self._q_turned)
        torch.mul(k_RWKE, rope_RW1E, out=self._k_slot[layer])
        self._v_slot[layer].copy_(v_RWKE)
        torch.bmm(self._q_of_group, self._prompt_k[layer], out=self._prompt_scores)
        torch.bmm(self._q_of_row, self._own_k[layer], out=self._own_scores)
        if self._mask is None:
            self._scores_of_prompt.copy_(self._prompt_scores.view_as(self._scores_of_prompt))
        else:
            torch.add(self._prompt_scores.view_as(self._scores_of_prompt), self._mask, out=self._scores_of_prompt)
        self._scores_filled.copy_(self._own_scores_filled)
        torch.softmax(self._scores, -1, out=self._probs)
        torch.bmm(self._probs_of_prompt, self._prompt_v[layer], out=self._mixed_of_group)
        self._mixed_of_row.baddbmm_(self._probs_of_own, self._own_v[layer])
        return self._mixed_RWKGE.reshape(-1, self._mixed_size)

    def _window(self, length: int) -> int:
        """Slots that the products run over: a few more than ``length``, so that shapes seldom change.

        torch sends products of fewer than 400 multiplications to a slow loop; the window never is that small.
        """
        smallest = 400 / (self._num_heads * self._prompts.v.shape[-1])
        return int(-(-max(length, smallest) // 8)) * 8

    def _prepare(self) -> None:
        """Buffers and views that last until the rows change."""
        L, R, K, W, _, E = self._k.shape
        G, P, lengths_R = self._num_heads, self._prompts.k.shape[-1], self._prompts.lengths
        q, mixed = torch.empty(2, R, K, W, G, E)
        self._q_turned = _as_complex(q).transpose(1, 2)
        self._q_of_group, self._q_of_row = q.view(R * K, W * G, E), q.view(R * K * W, G, E)
        self._mixed_of_group, self._mixed_of_row = mixed.view(R * K, W * G, E), mixed.view(R * K * W, G, E)
        self._mixed_RWKGE, self._mixed_size = mixed.transpose(1, 2), K * G * E
        self._prompt_k, self._prompt_v = self._prompts.k.view(L, R * K, E, P), self._prompts.v.view(L, R * K, P, E)
        self._prompt_scores = torch.empty(R * K, W * G, P)
        self.positions_B = lengths_R.repeat_interleave(W) + (self.length - 1)
        self._mask = None
        if bool((lengths_R < P).any()):
            padding_RP = torch.arange(P) >= lengths_R[:, None]
            self._mask = torch.zeros(R, 1, 1, P).masked_fill_(padding_RP[:, None, None], -torch.inf)
        self._prepare_window()

    def _prepare_window(self) -> None:
        """Buffers and views that last until the filled slots outgrow the window."""
        L, R, K, W, S, E = self._k.shape
        G, P = self._num_heads, self._prompts.k.shape[-1]
        self._size = min(self._window(self.length), S)
        self._own_k = self._k.view(L, R * K * W, S, E)[:, :, : self._size].transpose(2, 3)
        self._own_v = self._v.view(L, R * K * W, S, E)[:, :, : self._size]
        self._own_scores = torch.empty(R * K * W, G, self._size)
        self._scores = torch.full((R, K, W * G, padded_size(P + self._size)), -torch.inf)
        self._probs = torch.empty_like(self._scores)
        self._scores_of_prompt = self._scores[..., :P]
        self._probs_of_prompt = self._probs.view(R * K, W * G, -1)[:, :, :P]
        self._probs_of_own = self._probs.view(R * K * W, G, -1)[:, :, P : P + self._size]


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
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
