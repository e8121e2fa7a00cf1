"""Plain jnp form of verification: process the logits, add the position's noise, take the argmax, count the accepted.

Letters: B batch, K drafts, W = K + 1 window, V vocabulary. Filters are thresholds found by bisection over the bits of a
float; nothing is sorted. What no row of the batch asks for is skipped: on the device, or, where it is known beforehand
(`Sampling.asks`), by leaving it out of the program. On a GPU each choice on the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import dispatch
from pallas_kernels.verification import threefry
from pallas_kernels.verification.thresholds import keep_min_p, keep_top_k, keep_top_p

Result = TypeVar("Result")
Feature = Literal["temperature", "min_p", "top_k", "top_p", "min_tokens"]
Asks = frozenset[Feature] | None
FILTERS: tuple[Feature, ...] = ("min_p", "top_k", "top_p")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How each of the B rows of a batch samples. Greedy rows (temperature 0) ignore the filters and draw nothing.

    `no_stop` says where a stop id may not be sampled (yet). `asks`, part of the compiled program, names all that any
    row asks for; None where that is not known, and then the device decides. The result is the same.
    """

    temperature: Array  # [B] float32
    min_p: Array  # [B] float32, 0 = off
    top_k: Array  # [B] int32, 0 or less = off
    top_p: Array  # [B] float32, 1 = off
    stop_ids: Array  # [B,n] int32, padded with -1
    no_stop: Array  # [B,W] bool
    asks: Asks = field(default=None, metadata={"static": True})

    @property
    def sampled(self) -> Array:
        """[B] bool: rows that draw, rather than take the most likely token."""
        return self.temperature > 0

    @property
    def filters(self) -> tuple[Array, Array, Array]:
        """min_p, top_k and top_p [B], each 0 where it is off."""
        min_p, top_k = jnp.where(self.sampled, self.min_p, 0.0), jnp.where(self.sampled, self.top_k, 0)
        return min_p, jnp.maximum(top_k, 0), jnp.where(self.sampled & (self.top_p < 1), self.top_p, 0.0)


def verify(logits: Array, drafts: Array, keys: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Tokens [B,W] int32 and the number of accepted drafts [B] int32: see the package."""
    processed = process(logits, sampling)
    tokens = likeliest(processed + noise(keys, sampling, logits.shape[-1]))
    return tokens, accepted(tokens, drafts)


def likeliest(x: Array) -> Array:
    """int32 [...]: the argmax over the last axis of x [...,V], the first of several.

    Of a vocabulary that is spread over devices XLA's argmax has all indices sent around; two reductions send a number a
    row.
    """
    if not dispatch.is_spread():
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    last = x.shape[-1] - 1
    ids = jnp.broadcast_to(jnp.arange(last + 1, dtype=jnp.int32), x.shape)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, last), axis=-1)


def accepted(tokens: Array, drafts: Array) -> Array:
    """[B] int32: how many leading drafts [B,K] equal the tokens [B,W] at the same positions."""
    return leading(tokens[:, : drafts.shape[1]] == drafts)


def leading(passed: Array) -> Array:
    """[B] int32: the number of leading True in [B,K] bool."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)


def noise(keys: Array, sampling: Sampling, vocab_size: int) -> Array:
    """[B,W,V] float32 Gumbel noise of each position's own key [B,W,2] uint32; zeros for greedy rows."""
    return noise_of(keys, sampling, jnp.arange(vocab_size, dtype=jnp.int32))


def noise_of(keys: Array, sampling: Sampling, token_ids: Array) -> Array:
    """[B,W,U]: the columns of `noise` that belong to some tokens [U]. Nothing is drawn when all rows are greedy."""

    def draw() -> Array:
        drawn = token_noise(keys, token_ids[None, None])
        return jnp.where(sampling.sampled[:, None, None], drawn, 0.0)

    nothing = lambda: jnp.zeros((*keys.shape[:2], token_ids.shape[0]), jnp.float32)
    return _if_asked(sampling, "temperature", sampling.sampled, draw, nothing)


def _if_asked(
    sampling: Sampling, feature: Feature, rows: Array, do: Callable[..., Result], leave: Callable[..., Result],
    *args: Array,
) -> Result:  # fmt: skip
    """`do` if any of the rows asks for a feature, else `leave`."""
    if sampling.asks is None:
        return lax.cond(rows.any(), do, leave, *args)
    return do(*args) if feature in sampling.asks else leave(*args)


def token_noise(keys: Array, token_ids: Array) -> Array:
    """float32 standard Gumbel noise of some tokens [...,U] under each key [...,2] uint32."""
    return threefry.gumbel(threefry.bits((keys[..., :1], keys[..., 1:]), token_ids.astype(jnp.uint32)))


def process(logits: Array, sampling: Sampling, token_ids: Array | None = None) -> Array:
    """Logits [B,W,V] as the sampler sees them, float32; tokens that may not be sampled become -inf.

    token_ids [V]: the token that each column stands for, when the columns are not the vocabulary itself.
    """
    logits = mask_stops(logits, sampling, token_ids)
    scaled = lambda x: _scale_and_filter(x, sampling)
    return _if_asked(sampling, "temperature", sampling.sampled, scaled, lambda x: x, logits)


def mask_stops(logits: Array, sampling: Sampling, token_ids: Array | None = None) -> Array:
    """The part of `process` that concerns greedy rows too: stop ids where they may not be sampled yet."""

    def mask(x: Array) -> Array:
        ids = jnp.arange(x.shape[-1], dtype=jnp.int32) if token_ids is None else token_ids
        is_stop = (ids[None, :, None] == sampling.stop_ids[:, None, :]).any(-1)
        return jnp.where(sampling.no_stop[:, :, None] & is_stop[:, None, :], -jnp.inf, x)

    logits = logits.astype(jnp.float32)
    return _if_asked(sampling, "min_tokens", sampling.no_stop, mask, lambda x: x, logits)


def _scale_and_filter(logits: Array, sampling: Sampling) -> Array:
    logits = logits / jnp.where(sampling.sampled, sampling.temperature, 1.0)[:, None, None]
    for name, value, keep in zip(FILTERS, sampling.filters, (keep_min_p, keep_top_k, keep_top_p), strict=True):
        masked = lambda x, value, keep=keep: jnp.where(keep(x, value), x, -jnp.inf)
        logits = _if_asked(sampling, name, value > 0, masked, lambda x, _: x, logits, value[:, None])
    return logits


def position_keys(keys: Array, positions: Array, purpose: int) -> Array:
    """[B,W,2] uint32: of each request's key [B,2], folded with absolute positions [B,W] and with a purpose."""
    fold = lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), purpose)
    wrapped = jax.random.wrap_key_data(keys, impl="threefry2x32")
    return jax.random.key_data(jax.vmap(jax.vmap(fold, (None, 0)))(wrapped, positions.astype(jnp.uint32)))
