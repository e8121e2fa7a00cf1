"""Padding, positions and embeddings given from outside. The oracle of a padded batch is each row run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers import assert_close
from tests.target import oracle
from tests.target.oracle import Array, Pair, Trace

PairOf = Callable[[str], Pair]
TOKENS = 21
MASK = np.ones((7, TOKENS), bool)
MASK[1, :9] = False  # left
MASK[2, 13:] = False  # right
MASK[3, :4] = MASK[3, 17:] = False  # both
MASK[4, [0, 3, 4, 11, 20]] = False  # and in between
MASK[5, :-1] = False  # a single token, shorter than the convolution
MASK[6] = False  # a row of nothing


def each_row_alone(pair: Pair, ids: Array, mask: Array, positions: Array | None = None) -> list[Trace]:
    """transformers on the tokens that count, a row at a time; `positions` [3,B,T]."""
    rows = [i for i in range(len(ids)) if mask[i].any()]
    where = [{} if positions is None else {"position_ids": positions[:, i : i + 1, mask[i]]} for i in rows]
    return [oracle.torch_trace(pair.model, ids[i : i + 1, mask[i]], **w) for i, w in zip(rows, where, strict=True)]


def assert_rows(ours: Trace, alone: list[Trace], mask: Array) -> None:
    for i, expected in enumerate(alone):

        def pick(x: Array, i: int = i) -> Array:
            return x[i : i + 1, mask[i]]

        row = Trace(tuple(pick(x) for x in ours.boundaries), pick(ours.hidden), pick(ours.logits))
        oracle.assert_same(row, expected)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3", "qwen3_moe"])
def test_padding_never_reaches_a_token(family: str, pair_of: PairOf) -> None:
    pair = pair_of(family)
    ids = pair.token_ids(*MASK.shape)
    alone = each_row_alone(pair, ids, MASK)
    embeds = pair.model.model.embed_tokens.weight.detach().numpy()[ids]
    for garbage in (1e4, np.nan, np.inf):
        spoiled = np.where(MASK[..., None], embeds, np.float32(garbage))
        assert_rows(oracle.our_trace(pair.target, inputs_embeds=spoiled, attention_mask=MASK), alone, MASK)


def test_padded_token_ids_and_integer_mask(pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    ids = pair.token_ids(*MASK.shape)
    alone = each_row_alone(pair, ids, MASK)
    # An id outside the vocabulary, as some collators pad with.
    padded = np.where(MASK, ids, -100)
    assert_rows(oracle.our_trace(pair.target, padded, attention_mask=MASK.astype(np.int32)), alone, MASK)


def image_positions(batch: int, tokens: int) -> Array:
    """Text, then a picture 3 tokens wide whose time stands still, then text: [3,B,T], each row shifted."""
    picture = np.arange(9)
    time = np.concatenate([np.arange(5), np.full(9, 5), 8 + np.arange(tokens - 14)])
    height, width = time.copy(), time.copy()
    height[5:14], width[5:14] = 5 + picture // 3, 5 + picture % 3
    shift = 3 * np.arange(batch)[:, None]
    return np.stack([axis[None] + shift for axis in (time, height, width)]).astype(np.int32)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_three_axes_of_positions(family: str, pair_of: PairOf) -> None:
    pair = pair_of(family)
    ids, positions = pair.token_ids(2, TOKENS), image_positions(2, TOKENS)
    ours = oracle.our_trace(pair.target, ids, positions=positions)
    oracle.assert_same(ours, oracle.torch_trace(pair.model, ids, position_ids=positions))
    flat = oracle.our_trace(pair.target, ids, positions=positions[:1].repeat(3, axis=0))
    assert np.abs(ours.hidden - flat.hidden).max() > 1e-3  # the test's positions do differ by axis


def test_three_axes_of_positions_with_padding(pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    ids, positions = pair.token_ids(*MASK.shape), image_positions(*MASK.shape)
    alone = each_row_alone(pair, ids, MASK, positions)
    ours = oracle.our_trace(pair.target, ids, attention_mask=MASK, positions=np.where(MASK[None], positions, 10**6))
    assert_rows(ours, alone, MASK)


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_one_axis_of_positions_with_gaps(family: str, pair_of: PairOf) -> None:
    pair = pair_of(family)
    ids = pair.token_ids(2, TOKENS)
    positions = np.cumsum(1 + np.random.default_rng(1).integers(0, 3, ids.shape), axis=1).astype(np.int32)
    # The mask of ones keeps transformers from taking a gap for the start of another, packed, sequence.
    theirs = oracle.torch_trace(pair.model, ids, position_ids=positions, attention_mask=np.ones_like(ids, np.int64))
    oracle.assert_same(oracle.our_trace(pair.target, ids, positions=positions), theirs)


def test_embeddings_in_place_of_token_ids(pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    ids = pair.token_ids(2, TOKENS)
    given = oracle.our_trace(pair.target, inputs_embeds=np.asarray(pair.target.embed(ids)))
    assert_close(given.logits, oracle.our_trace(pair.target, ids).logits, 1e-6)


BOTH = {"token_ids": np.zeros((1, 2), np.int32), "inputs_embeds": np.zeros((1, 2, 40), np.float32)}


@pytest.mark.parametrize("given", [{}, BOTH], ids=["neither", "both"])
def test_either_ids_or_embeddings(given: dict[str, Any], pair_of: PairOf) -> None:
    with pytest.raises(ValueError, match="either token_ids or inputs_embeds"):
        pair_of("qwen3_5").target(**given)
