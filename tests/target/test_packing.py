"""Several sequences packed in a row give what each gives alone."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.segments import segment_positions
from tests.target import oracle
from tests.target.oracle import Array, Pair, Trace

PairOf = Callable[[str], Pair]
FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3", "qwen3_moe", "llama"]
# Three rows of 88 tokens. Segments of one token and shorter than the convolution; borders at a chunk's border (64) and
# on either side of it; a segment across it; padding on the right, none, and on both sides.
ROWS = [[(1, 1), (2, 2), (3, 61), (4, 20), (0, 4)], [(1, 63), (2, 1), (3, 24)], [(0, 3), (1, 40), (2, 22), (3, 23)]]
IDS = np.stack([np.repeat(*np.array(row, np.int32).T) for row in ROWS])


def pieces() -> list[tuple[int, Array]]:
    """(row, its tokens [T] bool) of every segment."""
    return [(b, IDS[b] == i) for b, row in enumerate(ROWS) for i, _ in row if i > 0]


def at(trace: Trace, row: int, tokens: Array) -> Trace:
    pick = lambda x: x[row : row + 1, tokens]
    return Trace(tuple(pick(x) for x in trace.boundaries), pick(trace.hidden), pick(trace.logits))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family: str, pair_of: PairOf) -> None:
    """Each segment alone stands in a row of its own, with zeros after it, which nothing before them can see."""
    pair = pair_of(family)
    ids = pair.token_ids(*IDS.shape)
    packed = oracle.our_trace(pair.target, ids, segment_ids=IDS)
    lone = np.zeros((len(pieces()), max(tokens.sum() for _, tokens in pieces())), np.int32)
    for i, (row, tokens) in enumerate(pieces()):
        lone[i, : tokens.sum()] = ids[row, tokens]
    alone = oracle.our_trace(pair.target, lone)
    for i, (row, tokens) in enumerate(pieces()):
        oracle.assert_same(at(packed, row, tokens), at(alone, i, np.arange(tokens.sum())))


def test_packed_with_a_mask_and_with_positions_given(pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    ids = pair.token_ids(*IDS.shape)
    plain = oracle.our_trace(pair.target, ids, segment_ids=IDS)
    positions = np.tile(np.asarray(segment_positions(jnp.asarray(IDS))), (3, 1, 1))
    given = oracle.our_trace(pair.target, ids, segment_ids=IDS, attention_mask=IDS > 0, positions=positions)
    for row, tokens in pieces():
        oracle.assert_same(at(given, row, tokens), at(plain, row, tokens))


def test_positions_count_from_each_start() -> None:
    got = segment_positions(jnp.asarray([[1, 1, 2, 3, 3, 3, 0, 0], [0, 1, 1, 1, 1, 1, 1, 2]], jnp.int32))
    assert got.tolist() == [[0, 1, 0, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 5, 0]]
