"""Plain jnp form of verification: process the logits, add the position's noise, take the argmax, count the accepted.

Letters: B batch, K drafts, W = K + 1 window, V vocabulary. Filters are thresholds found by bisection over the bits of a
float, one for all filters of a row; nothing is sorted. What no row of the batch asks for is skipped: on the device, or,
where it is known beforehand (`Sampling.asks`), by leaving it out of the program. On a GPU each choice on the device
waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.verification.drawing import draw, noise
from pallas_kernels.verification.sampling import Feature, Sampling, if_asked
from pallas_kernels.verification.thresholds import kept, least_min_p, least_top_k, least_top_p

__all__ = ["accepted", "leading", "mask_stops", "noise", "position_keys", "process", "thresholded", "verify"]

FILTERS: tuple[tuple[Feature, Callable[[Array, Array], Array]], ...] = (
    ("min_p", least_min_p), ("top_k", least_top_k), ("top_p", least_top_p),
)  # fmt: skip


def verify(logits: Array, drafts: Array, keys: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Tokens [B,W] int32 and the number of accepted drafts [B] int32: see the package."""
    tokens = draw(*thresholded(logits, sampling), keys, sampling)
    return tokens, accepted(tokens, drafts)


def accepted(tokens: Array, drafts: Array) -> Array:
    """[B] int32: how many leading drafts [B,K] equal the tokens [B,W] at the same positions."""
    return leading(tokens[:, : drafts.shape[1]] == drafts)


def leading(passed: Array) -> Array:
    """[B] int32: the number of leading True in [B,K] bool."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)


def process(logits: Array, sampling: Sampling, token_ids: Array | None = None) -> Array:
    """Logits [B,W,V] as the sampler sees them, float32; tokens that may not be sampled become -inf.

    token_ids [V]: the token that each column stands for, when the columns are not the vocabulary itself.
    """
    return kept(*thresholded(logits, sampling, token_ids))


def thresholded(logits: Array, sampling: Sampling, token_ids: Array | None = None) -> tuple[Array, Array]:
    """`process` in two parts: logits [B,W,V] without filters, and the least `ordered_bits` that these keep.

    The latter are uint32 [B,W], 0 in a row without filters.
    """
    logits = mask_stops(logits, sampling, token_ids)
    scaled = lambda x: _scale_and_threshold(x, sampling)
    unfiltered = lambda x: (x, jnp.zeros(x.shape[:2], jnp.uint32))
    return if_asked(sampling, "temperature", sampling.sampled, scaled, unfiltered, logits)


def mask_stops(logits: Array, sampling: Sampling, token_ids: Array | None = None) -> Array:
    """The part of `process` that concerns greedy rows too: stop ids where they may not be sampled yet."""

    def mask(x: Array) -> Array:
        ids = jnp.arange(x.shape[-1], dtype=jnp.int32) if token_ids is None else token_ids
        is_stop = (ids[None, :, None] == sampling.stop_ids[:, None, :]).any(-1)
        return jnp.where(sampling.no_stop[:, :, None] & is_stop[:, None, :], -jnp.inf, x)

    logits = logits.astype(jnp.float32)
    return if_asked(sampling, "min_tokens", sampling.no_stop, mask, lambda x: x, logits)


def _scale_and_threshold(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    scaled = logits / jnp.where(sampling.sampled, sampling.temperature, 1.0)[:, None, None]
    least = jnp.zeros(scaled.shape[:2], jnp.uint32)
    for (name, find), value in zip(FILTERS, sampling.filters, strict=True):
        # Each sees what those before it have kept.
        raised = lambda x, least, value, find=find: jnp.maximum(least, find(kept(x, least), value))
        least = if_asked(sampling, name, value > 0, raised, lambda _, least, __: least, scaled, least, value[:, None])
    return scaled, least


def position_keys(keys: Array, positions: Array, purpose: int) -> Array:
    """[B,W,2] uint32: of each request's key [B,2], folded with absolute positions [B,W] and with a purpose."""
    fold = lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), purpose)
    wrapped = jax.random.wrap_key_data(keys, impl="threefry2x32")
    return jax.random.key_data(jax.vmap(jax.vmap(fold, (None, 0)))(wrapped, positions.astype(jnp.uint32)))
