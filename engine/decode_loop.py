"""The embedded sampler's loop over one batch of rows: draw, stop, insert, end, compact, step.

Legend: B slots of the batch (rows and holes), ordered (R groups, W rows); S steps, one token of every slot each.
Bookkeeping is numpy on the host: a step costs a few vector operations, and Python touches a row only when it stops,
ends or gets tokens inserted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.types import FinishReason
from engine.decode_batch import DecodeBatch
from engine.draw import draw_greedy, draw_sampled, uniforms
from engine.packed_weights import PackedWeights
from engine.prefill import prefill
from engine.sampler import Completion, Respond, SamplingParams, Stopped

UNIFORM_STEPS = 16  # drawn at once
GROUP_COST = 0.15  # of one more group in a step, in rows


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to sample: its request's index, its index there and in the whole call.

    ``budget`` bounds the tokens that are sampled, ``room`` all that follow the prompt in the context.
    """

    request: int
    sample: int
    number: int
    budget: int
    room: int


class _Slots:
    """What the host knows of every slot. At a completion of length ``end_B`` its row ends, if it did not stop."""

    def __init__(self, rows: Sequence[Row], row_of_B: NDArray[np.int64], alive_B: NDArray[np.bool_]):
        self._rows = rows
        self.row_of_B = row_of_B
        self.alive_B = alive_B
        self.number_B = np.array([row.number for row in rows])[row_of_B]
        self.end_B = np.array([min(row.budget, row.room) for row in rows])[row_of_B]
        self.num_inserted_B = np.zeros(len(row_of_B), np.int64)
        self.num_turns_B = np.ones(len(row_of_B), np.int64)
        num_steps = int(self.end_B.max())
        self.token_SB = np.zeros((num_steps, len(row_of_B)), np.int64)
        self.logprob_SB = np.zeros((num_steps, len(row_of_B)), np.float32)
        self.inserted_SB = np.full((num_steps, len(row_of_B)), -1, np.int64)  # tokens to force, ahead of time
        self.inserted_until = 0

    def select(self, slot_of_B: NDArray[np.int64], alive_B: NDArray[np.bool_]) -> None:
        for name in ("row_of_B", "number_B", "end_B", "num_inserted_B", "num_turns_B"):
            setattr(self, name, getattr(self, name)[slot_of_B])
        for name in ("token_SB", "logprob_SB", "inserted_SB"):
            setattr(self, name, getattr(self, name)[:, slot_of_B])
        self.alive_B = alive_B

    def insert(self, slot: int, step: int, token_ids: Sequence[int]) -> None:
        """Force ``token_ids`` on the slot's steps from ``step`` on."""
        row, end = self._rows[self.row_of_B[slot]], step + len(token_ids)
        self.num_inserted_B[slot] += len(token_ids)
        self.num_turns_B[slot] += 1
        self.end_B[slot] = min(row.budget + self.num_inserted_B[slot], row.room)
        missing = int(self.end_B[slot]) - len(self.token_SB)
        if missing > 0:
            more = ((0, missing + 16), (0, 0))
            self.token_SB, self.logprob_SB = np.pad(self.token_SB, more), np.pad(self.logprob_SB, more)
            self.inserted_SB = np.pad(self.inserted_SB, more, constant_values=-1)
        self.inserted_SB[step:end, slot] = token_ids
        self.inserted_until = max(self.inserted_until, end)

    def completion(self, slot: int, length: int, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=tuple(self.token_SB[:length, slot].tolist()),
            loss_mask=tuple((self.inserted_SB[:length, slot] < 0).tolist()),
            logprobs=tuple(self.logprob_SB[:length, slot].tolist()),
            finish_reason=reason,
            num_turns=int(self.num_turns_B[slot]),
        )


class DecodeLoop:
    """Decodes one batch of rows to their ends."""

    def __init__(self, weights: PackedWeights, rows: Sequence[Row], params: SamplingParams, respond: Respond | None):
        self._weights, self._rows, self._params, self._respond = weights, rows, params, respond
        self._completions: list[Completion | None] = [None] * len(rows)
        self._uniform_SB2 = np.empty((0, 0, 2), np.float32)  # of the steps from _uniform_start on
        self._uniform_start = 0

    @torch.inference_mode()
    def run(self, prompts: Mapping[int, tuple[int, ...]], compact_below: float) -> list[Completion]:
        """Completions in the order of the rows; ``prompts`` holds each request's. Rows of a request are neighbours.

        Regroups the rows still running when the slots that they need fall below ``compact_below`` of the batch's.
        """
        index_of_request = {request: index for index, request in enumerate(prompts)}
        group_R, row_RW, alive_B = group_rows(np.array([index_of_request[row.request] for row in self._rows]))
        slots = _Slots(self._rows, row_RW.reshape(-1), alive_B)
        cache, hidden_RD = prefill(self._weights, list(prompts.values()))
        index_R = torch.from_numpy(group_R)
        batch = DecodeBatch(self._weights, cache.select(index_R), row_RW.shape[1])
        if not bool(hidden_RD.isfinite().all()):
            raise FloatingPointError("the sampler's weights give hidden states that are not finite; load a sound model")
        logits_BV = self._logits(hidden_RD).index_select(0, index_R.repeat_interleave(batch.width))
        length = 0
        while True:
            token_B = self._draw(logits_BV, slots, length)
            length += 1
            self._settle(slots, length)
            if not slots.alive_B.any():
                return [completion for completion in self._completions if completion is not None]
            kept_B = self._compact(batch, slots, compact_below)
            if kept_B is not None:
                token_B = token_B[kept_B]
            logits_BV = self._logits(batch.step(token_B))

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        return self._weights.logits(hidden_ND, self._params.temperature or 1.0)

    def _draw(self, logits_BV: Tensor, slots: _Slots, step: int) -> Tensor:
        """The tokens of this step, drawn or forced; records them."""
        if self._params.temperature == 0:
            token_B, logprob_B = draw_greedy(logits_BV)
        else:
            token_B, logprob_B = draw_sampled(logits_BV, self._uniforms(slots, step))
        if step < slots.inserted_until:
            inserted_B = torch.from_numpy(slots.inserted_SB[step])
            forced_B = inserted_B >= 0
            token_B = torch.where(forced_B, inserted_B, token_B)
            logprob_B = logprob_B.masked_fill(forced_B, 0.0)
        slots.token_SB[step] = token_B.numpy()
        slots.logprob_SB[step] = logprob_B.numpy()
        return token_B

    def _uniforms(self, slots: _Slots, step: int) -> Tensor:
        """(B, 2): a row's n-th sampled token takes the n-th entry of its stream."""
        if step >= self._uniform_start + len(self._uniform_SB2):
            index_SB = np.arange(step, step + UNIFORM_STEPS)[:, None] - slots.num_inserted_B
            self._uniform_SB2 = uniforms(self._params.seed, slots.number_B, index_SB)
            self._uniform_start = step
        return torch.from_numpy(self._uniform_SB2[step - self._uniform_start])

    def _forget_uniforms(self) -> None:
        """Rows or their counts of sampled tokens changed."""
        self._uniform_SB2 = self._uniform_SB2[:0]

    def _settle(self, slots: _Slots, length: int) -> None:
        """End the rows that stopped for good, spent their budget or filled the context; insert what others are told."""
        token_B = slots.token_SB[length - 1]
        stopped_B = np.zeros(len(token_B), bool)
        for stop in self._params.stop_token_ids:
            stopped_B |= token_B == stop
        stopped_B &= slots.alive_B
        if length <= slots.inserted_until:
            stopped_B &= slots.inserted_SB[length - 1] < 0
        stopped = np.flatnonzero(stopped_B).tolist()
        for slot, insertion in zip(stopped, self._ask(slots, stopped, length), strict=True):
            row = self._rows[slots.row_of_B[slot]]
            if insertion is None:
                self._end(slots, slot, length, "stop")
            elif length == slots.end_B[slot] or length + len(insertion) >= row.room:
                self._end(slots, slot, length, "length")
            else:
                slots.insert(slot, length, insertion)
                self._forget_uniforms()
        for slot in np.flatnonzero(slots.alive_B & (slots.end_B == length)).tolist():
            self._end(slots, slot, length, "length")

    def _ask(self, slots: _Slots, stopped: list[int], length: int) -> Sequence[Sequence[int] | None]:
        if self._respond is None or not stopped:
            return [None] * len(stopped)
        rows = [self._rows[slots.row_of_B[slot]] for slot in stopped]
        tokens = [tuple(slots.token_SB[:length, slot].tolist()) for slot in stopped]
        return self._respond([Stopped(r.request, r.sample, t) for r, t in zip(rows, tokens, strict=True)])

    def _end(self, slots: _Slots, slot: int, length: int, reason: FinishReason) -> None:
        self._completions[slots.row_of_B[slot]] = slots.completion(slot, length, reason)
        slots.alive_B[slot] = False

    def _compact(self, batch: DecodeBatch, slots: _Slots, compact_below: float) -> Tensor | None:
        """Leave finished rows out when that shrinks the batch enough; the old slots kept, in the new order."""
        alive = np.flatnonzero(slots.alive_B)
        if len(alive) >= compact_below * len(slots.alive_B):
            return None
        group_R, index_RW, alive_B = group_rows(alive // batch.width)
        if len(alive_B) >= compact_below * len(slots.alive_B):
            return None
        slot_RW = alive[index_RW]
        batch.select(torch.from_numpy(group_R), torch.from_numpy(slot_RW))
        slots.select(slot_RW.reshape(-1), alive_B)
        self._forget_uniforms()
        return torch.from_numpy(slot_RW.reshape(-1))


def group_rows(group_of_row: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Lay rows out in groups of one width: each group's prompt (R,), its rows (R, W), and which places hold one (B,).

    ``group_of_row`` is sorted. The width is the one with the cheapest step: a wide group reads its prompt once, a
    narrow one leaves fewer holes. A hole repeats a row of its own group.
    """
    groups, starts, counts = np.unique(group_of_row, return_index=True, return_counts=True)
    widths = np.arange(1, counts.max() + 1)
    num_groups_of_width = (-(-counts[:, None] // widths)).sum(0)
    W = int(widths[np.argmin(num_groups_of_width * (widths + GROUP_COST))])
    num_parts = -(-counts // W)
    part_R = np.arange(num_parts.sum()) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    place_RW = part_R[:, None] * W + np.arange(W)
    filled_RW = place_RW < np.repeat(counts, num_parts)[:, None]
    row_RW = np.repeat(starts, num_parts)[:, None] + np.where(filled_RW, place_RW, part_R[:, None] * W)
    return np.repeat(groups, num_parts), row_RW, filled_RW.reshape(-1)
