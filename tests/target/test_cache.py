"""Prefill in chunks and windows with rejected guesses give the hidden states of one pass, for any split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.cache import Cache, target_cache
from eagle3_jax.target import TargetOutput
from tests.helpers import assert_close
from tests.target import oracle
from tests.target.oracle import Array, Pair, quick_jit

PairOf = Callable[[str], Pair]
AUX = (1, 2)
PAGE = 8
MAX_LENGTH = 64
SLOTS = 3
Rows = Sequence[Sequence[int]]


@functools.partial(quick_jit, static_argnums=0)
def _prefill(graph: Any, state: Any, tokens: Array, count: Array, cache: Cache) -> tuple[TargetOutput, Cache]:
    return nnx.merge(graph, state).prefill(tokens, count, cache, aux_layers=AUX)


@functools.partial(quick_jit, static_argnums=0)
def _window(graph: Any, state: Any, tokens: Array, cache: Cache) -> tuple[TargetOutput, Cache]:
    return nnx.merge(graph, state).window(tokens, cache, aux_layers=AUX)


class Session:
    """Slots that are fed token lists; keeps what each has seen and what came out, and compares with one pass."""

    def __init__(self, pair: Pair, *, window: int, seed: int = 0) -> None:
        self.pair, self.width, self.rng = pair, window, np.random.default_rng(seed)
        self.graph, self.state = nnx.split(pair.target)
        cache = target_cache(pair.config, SLOTS, MAX_LENGTH, window, dtype=jnp.float32, page_size=PAGE)
        # Pages lie anywhere; only the table knows.
        table = self.rng.permutation(cache.page_table.size).reshape(cache.page_table.shape).astype(np.int32)
        self.cache = cache.with_page_table(jnp.asarray(table))
        self.seen: list[list[int]] = [[] for _ in range(SLOTS)]
        self.got: list[list[Array]] = [[] for _ in range(SLOTS)]

    def prefill(self, rows: Rows, chunk: int) -> None:
        tokens, count = self._among_garbage(rows, chunk)
        out, self.cache = _prefill(self.graph, self.state, tokens, count, self.cache)
        self._keep(rows, out)

    def window(self, accepted: Rows) -> None:
        """Verifies windows that begin with the `accepted` tokens and go on with wrong guesses."""
        tokens, count = self._among_garbage(accepted, self.width)
        out, cache = _window(self.graph, self.state, tokens, self.cache)
        self.cache = cache.commit(jnp.asarray(count))
        self._keep(accepted, out)

    def reset(self, slots: Array) -> None:
        self.cache = self.cache.reset(jnp.asarray(slots))
        for i in np.flatnonzero(slots):
            self.seen[i], self.got[i] = [], []

    def check(self) -> None:
        """Every token's hidden state and aux states equal those of transformers' single pass over its sequence."""
        assert np.asarray(self.cache.lengths).tolist() == [len(s) for s in self.seen]
        for seen, got in zip(self.seen, self.got, strict=True):
            if seen:
                trace = oracle.torch_trace(self.pair.model, np.asarray([seen]))
                want = np.stack([trace.hidden[0], *(trace.boundaries[b][0] for b in AUX)], axis=1)
                assert_close(np.stack(got), want, 1e-5)

    def _among_garbage(self, rows: Rows, width: int) -> tuple[Array, Array]:
        tokens = self.rng.integers(0, self.pair.config.vocab_size, (SLOTS, width), dtype=np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        return tokens, np.asarray([len(row) for row in rows], np.int32)

    def _keep(self, rows: Rows, out: TargetOutput) -> None:
        states = np.stack([out.hidden, *out.aux], axis=2)  # [B,T,1+len(AUX),D]
        for i, row in enumerate(rows):
            self.seen[i] += list(row)
            self.got[i] += list(states[i, : len(row)])


class Source:
    """Deals out the next tokens of each slot's text, a random number of them at a time."""

    def __init__(self, pair: Pair, lengths: Sequence[int], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.left = [pair.token_ids(n, seed=seed + i).tolist() for i, n in enumerate(lengths)]

    def take(self, most: int, least: int = 0) -> list[list[int]]:
        rows = []
        for i, left in enumerate(self.left):
            n = int(self.rng.integers(least, most + 1))
            rows.append(left[:n])
            self.left[i] = left[n:]
        return rows

    def __bool__(self) -> bool:
        return any(self.left)


def run_to_the_end(session: Session, *, prompt: Source, text: Source, chunk: int) -> None:
    while prompt:
        session.prefill(prompt.take(chunk), chunk)
    session.window([[], [], []])  # all rejected, before anything is pending
    while text:
        session.window(text.take(session.width))
    session.window([[], [], []])
    session.check()


@pytest.mark.parametrize(("chunk", "window"), [(1, 2), (2, 1), (8, 4), (24, 8), (5, 16)])
def test_any_split_and_any_verdict(chunk: int, window: int, pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    session = Session(pair, window=window)
    prompt, text = Source(pair, (17, 2, 30), seed=1), Source(pair, (20, 30, 9), seed=2)
    run_to_the_end(session, prompt=prompt, text=text, chunk=chunk)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "qwen3_moe", "llama"])
def test_every_kind_of_layer(family: str, pair_of: PairOf) -> None:
    pair = pair_of(family)
    session = Session(pair, window=4)
    prompt, text = Source(pair, (11, 1, 14), seed=3), Source(pair, (10, 14, 7), seed=4)
    run_to_the_end(session, prompt=prompt, text=text, chunk=8)


def test_prompts_may_follow_windows(pair_of: PairOf) -> None:
    """A conversation's next turn: the prefill commits what the last window left pending, rows with no tokens too."""
    pair = pair_of("qwen3_5")
    session, text = Session(pair, window=4), Source(pair, (40, 40, 40), seed=5)
    for _ in range(5):
        session.prefill([row if i != 1 else [] for i, row in enumerate(text.take(8))], 8)
        session.window(text.take(4))
        session.window(text.take(4))
    session.check()


def test_whole_windows_then_none(pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    session, text = Session(pair, window=4), Source(pair, (30, 30, 30), seed=6)
    session.prefill(text.take(2, least=2), 8)  # shorter than the convolution
    for _ in range(4):
        session.window(text.take(4, least=4))
        session.window([[], [], []])
        session.window([[], [], []])
    session.check()


def test_reset_leaves_the_other_slots_alone(pair_of: PairOf) -> None:
    pair = pair_of("qwen3_5")
    session, text = Session(pair, window=4), Source(pair, (60, 60, 60), seed=7)
    session.prefill(text.take(8, least=5), 8)
    session.window(text.take(4, least=1))
    session.reset(np.array([False, True, False]))
    session.window(text.take(4, least=1))
    session.check()
    session.reset(np.array([True, False, True]))
    session.prefill(text.take(8), 8)
    session.window(text.take(4, least=2))
    session.check()


def test_up_to_the_last_place_of_a_slot(pair_of: PairOf) -> None:
    """The last windows reach beyond what a slot can hold; what of them is accepted does not."""
    pair = pair_of("qwen3_5")
    session, text = Session(pair, window=4), Source(pair, (MAX_LENGTH,) * SLOTS, seed=8)
    for _ in range(7):
        session.prefill(text.take(8, least=7), 8)
    while text:
        session.window(text.take(4))
    session.check()
    assert np.asarray(session.cache.lengths).tolist() == [MAX_LENGTH] * SLOTS
