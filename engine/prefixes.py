"""Rows in which sequences that begin alike share their beginning: the tokens of a row form a tree of prefixes.

A causal model's state after a prefix depends on that prefix only, so that one position can stand for all sequences
that begin with it: the prompt of a group is computed once, and so is whatever its completions have in common. The
gradient is exact: each position receives the sum over the sequences that pass through it.

Legend: T positions of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Row:
    """One row while it is being filled.

    ``paths`` maps a sequence's key to the row's positions that spell it; ``branches`` lists (first new position, the
    positions seen before it) of every stretch that was added.
    """

    token_ids_T: list[int] = field(default_factory=list)
    position_ids_T: list[int] = field(default_factory=list)
    paths: dict[int, list[int]] = field(default_factory=dict)
    branches: list[tuple[int, list[int]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids_T)

    def add(self, key: int, sequence: Sequence[int], shared: list[int]) -> None:
        """Appends ``sequence`` but for its first tokens, which stand at the positions ``shared`` already."""
        start, depth = len(self), len(shared)
        if len(sequence) > depth or not self.branches:
            self.branches.append((start, shared))
        self.token_ids_T += sequence[depth:]
        self.position_ids_T += range(depth, len(sequence))
        self.paths[key] = [*shared, *range(start, len(self))]

    def visible(self, size: int) -> NDArray[np.bool_]:
        """(size, size): row i sees column j, one of the positions of its own prefix. Padding sees itself."""
        visible_TT = np.zeros((size, size), bool)
        ends = [start for start, _ in self.branches[1:]] + [len(self)]
        for (start, shared), end in zip(self.branches, ends, strict=True):
            visible_TT[start:end, shared] = True
            visible_TT[start:end, start:end] = np.tri(end - start, dtype=bool)
        np.fill_diagonal(visible_TT[len(self) :, len(self) :], True)
        return visible_TT


def share_prefixes(sequences: Mapping[int, Sequence[int]], row_size: int) -> list[Row]:
    """Rows of at most ``row_size`` positions (or one longer sequence) that hold every sequence, the shortest row first.

    Sequences are taken in the order of their tokens, so that those that begin alike meet.
    """
    rows: list[Row] = []
    last: Sequence[int] = ()
    for key, sequence in sorted(sequences.items(), key=lambda item: (item[1], item[0])):
        shared = list(rows[-1].paths.values())[-1][: _num_common(last, sequence)] if rows else []
        if not rows or len(rows[-1]) + len(sequence) - len(shared) > row_size:
            rows.append(Row())
            shared = []
        rows[-1].add(key, sequence, shared)
        last = sequence
    return sorted(rows, key=len)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
