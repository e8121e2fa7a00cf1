"""The draft vocabulary: the U tokens that the assistant says most, as a table of absolute target ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from eagle3_jax.errors import ConfigError
from train.data.conversations import Row


def count_supervised(rows: Iterable[Row], vocab_size: int) -> np.ndarray:
    """How often the assistant says each token: [V] int64."""
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        counts += np.bincount(row.tokens[row.mask], minlength=vocab_size)
    return counts


def choose_draft_vocab(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent of V tokens, ids ascending: int32 [U]. Lower ids win ties and fill up what is unused.

    Raises:
      ConfigError: `size` is not within 1..V.
    """
    if not 0 < size <= len(counts):
        raise ConfigError(f"a draft vocabulary of {size} tokens does not fit a target's of {len(counts)}")
    most_frequent = np.argsort(-counts, kind="stable")[:size]
    return np.sort(most_frequent).astype(np.int32)


def draft_index(d2t: np.ndarray, vocab_size: int) -> np.ndarray:
    """The inverse of `d2t`: [V] int32, the draft id of each target token, -1 for those that cannot be drafted."""
    index = np.full(vocab_size, -1, np.int32)
    index[d2t] = np.arange(len(d2t), dtype=np.int32)
    return index


def coverage(counts: np.ndarray, d2t: np.ndarray) -> float:
    """The share of what the assistant says that the draft vocabulary can say: a bound on acceptance."""
    return float(counts[d2t].sum() / max(counts.sum(), 1))
