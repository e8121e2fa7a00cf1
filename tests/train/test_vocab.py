"""Choosing the draft vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_jax.errors import ConfigError
from train.data.conversations import Row
from train.data.vocab import choose_draft_vocab, count_supervised, coverage, draft_index


def test_counts_are_of_supervised_tokens_only() -> None:
    rows = [Row(np.array([1, 2, 2, 5]), np.array([0, 1, 1, 0], bool)), Row(np.array([2, 3]), np.array([0, 1], bool))]
    assert count_supervised(rows, 6).tolist() == [0, 0, 2, 1, 0, 0]


def test_most_frequent_ids_ascending_lower_ids_on_ties() -> None:
    counts = np.array([0, 5, 1, 9, 1, 0])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 2, 3]
    assert choose_draft_vocab(counts, 3).dtype == np.int32
    assert coverage(counts, np.array([1, 3])) == 14 / 16


def test_more_ids_than_tokens_seen_are_filled_with_unused_ones() -> None:
    assert choose_draft_vocab(np.array([0, 5, 0, 0, 2, 0]), 4).tolist() == [0, 1, 2, 4]


def test_the_whole_vocabulary_is_the_identity() -> None:
    assert choose_draft_vocab(np.array([3, 0, 7]), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 4])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        choose_draft_vocab(np.ones(3, np.int64), size)


def test_draft_index_inverts() -> None:
    assert draft_index(np.array([1, 4]), 6).tolist() == [-1, 0, -1, -1, 1, -1]
