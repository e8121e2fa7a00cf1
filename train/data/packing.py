"""Packing: several rows one after another in a sequence, so that little of a batch is padding.

The model keeps them apart by their segment ids: what a row gives, it gives packed. Which rows share a sequence is a
function of (rows, length, seed) and stays so for a whole run, so that a step still says which batch it sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from train.data.conversations import Row

OPEN_SEQUENCES = 1024


def pack_rows(rows: Sequence[Row], length: int, seed: int) -> list[Row]:
    """The rows, none longer than `length`, packed first-fit in a random order into sequences of at most `length`."""
    order = np.random.default_rng(seed).permutation(len(rows))
    groups = first_fit([len(rows[i].tokens) for i in order], length)
    return [_join([rows[order[i]] for i in group]) for group in groups]


def first_fit(sizes: Sequence[int], capacity: int, *, num_open: int = OPEN_SEQUENCES) -> list[list[int]]:
    """Indices of `sizes` in groups of at most `capacity`: each goes to the first group that has room.

    Only the newest `num_open` groups are looked through, which bounds the time and costs next to nothing.
    """
    groups: list[list[int]] = []
    room = np.zeros(len(sizes), np.int64)
    for i, size in enumerate(sizes):
        first = max(0, len(groups) - num_open)
        fitting = room[first : len(groups)] >= size
        at = first + int(fitting.argmax()) if fitting.any() else len(groups)
        if at == len(groups):
            groups.append([])
            room[at] = capacity
        groups[at].append(i)
        room[at] -= size
    return groups


def _join(rows: Sequence[Row]) -> Row:
    ids = [np.full(len(row.tokens), i + 1, np.int32) for i, row in enumerate(rows)]
    tokens, mask = np.concatenate([row.tokens for row in rows]), np.concatenate([row.mask for row in rows])
    return Row(tokens, mask, np.concatenate(ids), tuple(part for row in rows for part in row.stored))


def filled(rows: Sequence[Row], length: int) -> float:
    """Packing efficiency: the share of the places of all sequences of `length` that hold a token."""
    return sum(len(row.tokens) for row in rows) / (len(rows) * length)
