"""Verification of windows. Letters: B batch, W window, V vocabulary. The floor is one argmax over the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.cases.case import KERNEL, Case, Draw, Grid, Sizes, implementations
from pallas_kernels import dispatch, verification
from pallas_kernels.verification import Asks, Sampling, thresholds

WINDOW, STOP_IDS = 4, 16
SEARCH_AND_DRAW = "verification.threshold", "verification.draw"
SAMPLED = "temperature 0.8, top_p 0.95"


def cases(s: Sizes, g: Grid) -> Iterator[Case]:
    for batch in g.verify_batches:
        yield from (coupled(s, batch, sampled) for sampled in (False, True))
        yield standard(s, batch)
        yield from (nucleus(batch, *size, flat) for size in ((WINDOW, s.vocab), (1, s.draft_vocab)) for flat in (0, 1))
        yield from (drawn(s, batch, few) for few in (False, True))


def nucleus(batch: int, window: int, vocab: int, flat: bool) -> Case:
    """The search for top_p 0.95 in the target's logits, or in a draft's: it keeps some hundred tokens, or most."""

    def make(key: Array) -> tuple[Any, ...]:
        logits = (1 if flat else 5) * Draw(key).normal(batch, window, vocab)
        return logits, logits.max(-1), jnp.full((batch, window), 0.95)

    ways = implementations(thresholds.threshold, "reference", KERNEL)
    shape, size = f"B {batch}, W {window}, V {vocab}{', most kept' if flat else ''}", 4 * batch * window * vocab
    exact = ways["reference"].run
    return Case("verification.threshold", shape, make, ways, exact, _argmax, bytes=size)


def drawn(s: Sizes, batch: int, few: bool) -> Case:
    """Tokens of the target's logits, of which all are kept, or those within 3 of the best: some tens of 248,320."""

    def make(key: Array) -> tuple[Any, ...]:
        logits, _, keys = _window(Draw(key), s, batch)
        least = thresholds.ordered_bits(logits.max(-1) - 3) if few else jnp.zeros((batch, WINDOW), jnp.uint32)
        return logits, least, keys, _sampling(batch, True)

    ways = implementations(verification.draw, "reference", KERNEL)
    shape, size = f"B {batch}, W {WINDOW}, {'few' if few else 'all'} kept", 4 * batch * WINDOW * s.vocab
    return Case("verification.draw", shape, make, ways, ways["reference"].run, _argmax, bytes=size)


def coupled(s: Sizes, batch: int, sampled: bool) -> Case:
    def make(key: Array) -> tuple[Any, ...]:
        return *_window(Draw(key), s, batch), _sampling(batch, sampled)

    ways = implementations(
        _with(verification.verify, gpu=SEARCH_AND_DRAW, tpu=("verification.verify",)), "reference", KERNEL
    )
    shape, size = f"B {batch}, W {WINDOW}, {SAMPLED if sampled else 'greedy'}", 4 * batch * WINDOW * s.vocab
    return Case("verification.verify", shape, make, ways, ways["reference"].run, _argmax, bytes=size)


def _with(function: Any, **parts: tuple[str, ...]) -> Any:
    """`function` with an implementation of its parts. Raises NotImplementedError where one of `parts` gave way."""

    def run(*args: Any, implementation: str) -> Any:
        with dispatch.using(implementation):
            found = function(*args)
        for part in parts.get(implementation, ()):
            if part in dispatch.fallbacks():
                raise NotImplementedError(dispatch.fallbacks()[part])
        return found

    return run


def standard(s: Sizes, batch: int) -> Case:
    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        logits, drafts, keys = _window(draw, s, batch)
        q = jax.nn.softmax(3 * draw.normal(batch, WINDOW - 1, s.draft_vocab), axis=-1)
        d2t, uniform = jnp.arange(s.draft_vocab, dtype=jnp.int32), draw.uniform(batch, WINDOW - 1)
        return logits, drafts % s.draft_vocab, q, d2t, uniform, keys, _sampling(batch, True)

    ways = implementations(
        _with(verification.verify_standard, gpu=SEARCH_AND_DRAW[:1], tpu=("verification.summary",)), "reference", KERNEL
    )
    shape, size = f"B {batch}, W {WINDOW}, {SAMPLED}", 4 * batch * WINDOW * s.vocab
    exact = ways["reference"].run
    return Case("verification.verify_standard", shape, make, ways, exact, _argmax, bytes=size)


def _argmax(logits: Array, *_: Any) -> Array:
    return jnp.argmax(logits, axis=-1)


def _window(draw: Draw, s: Sizes, batch: int) -> tuple[Array, Array, Array]:
    """Logits [B,W,V], drafts [B,W-1] that are the likeliest tokens in every other row, and keys [B,W,2]."""
    logits = 3 * draw.normal(batch, WINDOW, s.vocab)
    best = jnp.argmax(logits[:, :-1], axis=-1).astype(jnp.int32)
    even = jnp.arange(batch, dtype=jnp.int32)[:, None] % 2 == 0
    keys = jnp.arange(2 * batch * WINDOW, dtype=jnp.uint32).reshape(batch, WINDOW, 2)
    return logits, jnp.where(even, best, 0), keys


def _sampling(batch: int, sampled: bool) -> Sampling:
    """As the engine runs it: what the rows ask for is known when the program is made."""
    row = lambda x: jnp.full((batch,), x, jnp.float32)
    stop_ids, no_stop = jnp.full((batch, STOP_IDS), -1, jnp.int32), jnp.zeros((batch, WINDOW), jnp.bool_)
    heat, top_p = (0.8, 0.95) if sampled else (0.0, 1.0)
    asks: Asks = frozenset(("temperature", "top_p") if sampled else ())
    return Sampling(row(heat), row(0.0), jnp.zeros(batch, jnp.int32), row(top_p), stop_ids, no_stop, asks)
