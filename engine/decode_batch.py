"""Rows being decoded: their cache, the buffers of a step, and the step itself.

Legend: L layers, R groups of rows with one prompt, W rows of a group, B = R*W rows, P prompt tokens, S slots,
K key-value heads, G query heads of each (H = K*G), C = H + K, E head size, D hidden size, I MLP size.

What makes a step fast on a CPU: no allocation and few operations; a group's queries are one matrix against its prompt,
kept once; each row's own slots lie without gaps in memory, in the order in which they are read (a gap a row costs half
the attention's speed); shapes that torch sends to its batched product, and last dimensions in whole vectors.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from engine.draw import padded_size
from engine.packed_weights import PackedLayer, PackedWeights, as_complex
from engine.prefill import Prompts

SLOT_STEP = 8


class DecodeBatch:
    """R groups of W rows, in the order (R, W) outside and (R, K, W, G) inside.

    All rows have taken the same number of steps, so slot s of every row is step s. No row looks at another's slots:
    a finished row may run on, even past the context's end, until ``select`` leaves it out.
    """

    def __init__(self, weights: PackedWeights, prompts: Prompts, width: int):
        self._weights = weights
        self._prompts = prompts
        self.width = width
        self._length = 0
        L, R, K, _, E = prompts.v.shape
        self._k = torch.zeros(L, R, K, width, self._num_slots(1), E)
        self._v = torch.zeros_like(self._k)
        self._prepare_rows()
        self._prepare_slots()

    def step(self, token_ids_B: Tensor) -> Tensor:
        """Append one token to every row; the hidden states (B, D) after it, in a buffer that the next step reuses."""
        weights = self._weights
        self._open_slot()
        torch.index_select(weights.embedding_VD, 0, token_ids_B, out=self._hidden_BD)
        torch.index_select(weights.rope_TE, 0, self._position_B, out=self._rope_BE)
        for index, layer in enumerate(weights.layers):
            weights.normalize(self._hidden_BD, self._norm_B1, self._normed_BD)
            torch.mm(self._normed_BD, layer.qkv, out=self._qkv_BD)
            weights.normalize_heads(self._qk_raw_BCE, layer, self._qk_BCE)
            self._attend(index)
            self._hidden_BD.addmm_(self._mixed_BD, layer.out)
            self._mlp(layer)
        return self._hidden_BD

    def select(self, group_of_R: Tensor, row_of_RW: Tensor) -> None:
        """Regroup: new group r has the prompt of old group ``group_of_R[r]`` and the old rows ``row_of_RW[r]``."""
        L, _, K, _, S, E = self._k.shape
        R, W = row_of_RW.shape
        group_RW, place_RW = row_of_RW // self.width, row_of_RW % self.width
        source_RKW = (group_RW[:, None] * K + torch.arange(K)[:, None]) * self.width + place_RW[:, None]
        self._k, self._v = (
            t.view(L, -1, S, E).index_select(1, source_RKW.reshape(-1)).view(L, R, K, W, S, E)
            for t in (self._k, self._v)
        )
        self._prompts = self._prompts.select(group_of_R)
        self.width = W
        self._prepare_rows()
        self._prepare_slots()

    def _attend(self, layer: int) -> None:
        """Store the new keys and values, then mix each row's values over its prompt and its own slots."""
        torch.mul(self._q_RWKGE, self._rope_RW11E, out=self._q_turned)
        torch.mul(self._k_RWKE, self._rope_RW1E, out=self._k_slot[layer])
        self._v_slot[layer].copy_(self._v_RWKE)
        torch.bmm(self._q_of_group, self._prompt_k[layer], out=self._prompt_scores)
        torch.bmm(self._q_of_row, self._own_k[layer], out=self._own_scores)
        if self._padding is None:
            self._scores_of_prompt.copy_(self._prompt_scores_RKWP)
        else:
            torch.add(self._prompt_scores_RKWP, self._padding, out=self._scores_of_prompt)
        self._scores_filled.copy_(self._own_scores_filled)
        torch.softmax(self._scores, -1, out=self._probs)
        torch.bmm(self._probs_of_prompt, self._prompt_v[layer], out=self._mixed_of_group)
        self._mixed_of_row.baddbmm_(self._probs_of_own, self._own_v[layer])
        self._mixed_RWKGE.copy_(self._mixed_turned)

    def _mlp(self, layer: PackedLayer) -> None:
        self._weights.normalize(self._hidden_BD, self._norm_B1, self._normed_BD)
        torch.mm(self._normed_BD, layer.gate_up, out=self._gate_up_BI)
        self._hidden_BD.addmm_(silu(self._gate_BI, inplace=True).mul_(self._up_BI), layer.down)

    def _open_slot(self) -> None:
        self._length += 1
        length, P = self._length, self._prompts.k.shape[-1]
        if length > self._k.shape[4]:
            more = self._num_slots(length + length // 4) - self._k.shape[4]
            self._k, self._v = (pad(t, (0, 0, 0, more)) for t in (self._k, self._v))
            self._prepare_slots()
        self._position_B += 1
        if P + length > len(self._weights.rope_TE):
            self._position_B.clamp_(max=len(self._weights.rope_TE) - 1)
        self._own_scores_filled = self._own_scores[:, :, :length]
        self._scores_filled = self._scores_of_row[:, :, P : P + length]
        self._k_slot = as_complex(self._k[..., length - 1, :]).transpose(2, 3)
        self._v_slot = self._v[..., length - 1, :].transpose(2, 3)

    def _num_slots(self, length: int) -> int:
        return -(-max(length, self._weights.min_keys) // SLOT_STEP) * SLOT_STEP

    def _prepare_rows(self) -> None:
        """Buffers and views that last until the rows change."""
        shape, G = self._weights.shape, self._weights.num_groups
        L, R, K, W, _, E = self._k.shape
        B, H, P, lengths_R = R * W, K * G, self._prompts.k.shape[-1], self._prompts.lengths
        self._hidden_BD = torch.empty(B, shape.hidden_size)
        self._normed_BD = torch.empty(B, shape.hidden_size)
        self._norm_B1 = torch.empty(B, 1)
        self._position_B = lengths_R.repeat_interleave(W) + (self._length - 1)
        self._rope_BE = torch.empty(B, E // 2, dtype=torch.complex64)
        self._rope_RW1E = self._rope_BE.view(R, W, 1, E // 2)
        self._rope_RW11E = self._rope_RW1E.unsqueeze(3)
        self._qkv_BD = torch.empty(B, (H + 2 * K) * E)
        qkv_BCE = self._qkv_BD.view(B, H + 2 * K, E)
        self._qk_raw_BCE, v_BKE = qkv_BCE[:, : H + K], qkv_BCE[:, H + K :]
        self._v_RWKE = v_BKE.view(R, W, K, E)
        self._qk_BCE = torch.empty(B, H + K, E)
        qk_complex = as_complex(self._qk_BCE)
        self._q_RWKGE = qk_complex[:, :H].view(R, W, K, G, E // 2)
        self._k_RWKE = qk_complex[:, H:].view(R, W, K, E // 2)
        q, mixed = torch.empty(2, R, K, W, G, E)
        self._q_turned, self._mixed_turned = as_complex(q).transpose(1, 2), mixed.transpose(1, 2)
        self._q_of_group, self._q_of_row = q.view(R * K, W * G, E), q.view(R * K * W, G, E)
        self._mixed_of_group, self._mixed_of_row = mixed.view(R * K, W * G, E), mixed.view(R * K * W, G, E)
        self._mixed_BD = torch.empty(B, H * E)
        self._mixed_RWKGE = self._mixed_BD.view(R, W, K, G, E)
        self._prompt_k, self._prompt_v = self._prompts.k.view(L, R * K, E, P), self._prompts.v.view(L, R * K, P, E)
        self._prompt_scores = torch.empty(R * K, W * G, P)
        self._prompt_scores_RKWP = self._prompt_scores.view(R, K, W * G, P)
        padding_RP = torch.arange(P) >= lengths_R[:, None]
        any_padding = bool(padding_RP.any())
        self._padding = torch.where(padding_RP, -torch.inf, 0.0)[:, None, None] if any_padding else None
        self._gate_up_BI = torch.empty(B, 2 * shape.intermediate_size)
        self._gate_BI, self._up_BI = self._gate_up_BI.chunk(2, -1)

    def _prepare_slots(self) -> None:
        """Buffers and views that last until the slots grow. Scores of slots not yet filled stay -inf."""
        L, R, K, W, S, E = self._k.shape
        G, P = self._weights.num_groups, self._prompts.k.shape[-1]
        self._own_k = self._k.view(L, R * K * W, S, E).transpose(2, 3)
        self._own_v = self._v.view(L, R * K * W, S, E)
        self._own_scores = torch.empty(R * K * W, G, S)
        self._scores = torch.full((R, K, W * G, padded_size(P + S)), -torch.inf)
        self._scores_of_row = self._scores.view(R * K * W, G, -1)
        self._scores_of_prompt = self._scores[..., :P]
        self._probs = torch.empty_like(self._scores)
        self._probs_of_prompt = self._probs.view(R * K, W * G, -1)[:, :, :P]
        self._probs_of_own = self._probs.view(R * K * W, G, -1)[:, :, P : P + S]
