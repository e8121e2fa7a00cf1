"""Which token is drawn: the likeliest of those kept, with the noise of its position added (the Gumbel-max trick).

Letters: B batch, W window, V vocabulary, U some tokens of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels import dispatch, proof
from pallas_kernels.verification import threefry
from pallas_kernels.verification.sampling import Sampling, if_asked
from pallas_kernels.verification.thresholds import kept


def draw(
    scaled: Array, least: Array, keys: Array, sampling: Sampling, token_ids: Array | None = None, *,
    implementation: str | None = None,
) -> Array:  # fmt: skip
    """int32 [B,W]: the column of the largest sum of logit and noise, the first of several; 0 where nothing is kept.

    Args:
      scaled: [B,W,V] float32. least: [B,W] uint32, logits whose `ordered_bits` are less are not drawn; both of
        `reference.thresholded`. keys: [B,W,2] of `position_keys`. sampling: greedy rows get no noise.
      token_ids: [V] int32, the token that each column stands for; None: the columns are the vocabulary.
      implementation: see `pallas_kernels.dispatch`. "gpu" reads the logits once, and makes noise only around those that
        are kept; the default on GPUs, unless all rows are known to be greedy, where XLA's argmax is faster.
    """
    choice = {"reference": _draw, "gpu": _draw_gpu}
    default = "gpu" if sampling.asks is None or "temperature" in sampling.asks else dispatch.REFERENCE
    arguments = (scaled, least, keys, sampling, token_ids)
    return dispatch.call("verification.draw", implementation, choice, *arguments, default=default)


def _draw(scaled: Array, least: Array, keys: Array, sampling: Sampling, token_ids: Array | None) -> Array:
    ids = jnp.arange(scaled.shape[-1], dtype=jnp.int32) if token_ids is None else token_ids
    return likeliest(kept(scaled, least) + noise_of(keys, sampling, ids))


def _draw_gpu(*args: Any) -> Array:
    dispatch.require_gpu()
    from pallas_kernels.verification import draw_gpu  # Pallas takes a while to import

    some = args[4] is not None
    name, case = f"verification.draw on this GPU, {'some' if some else 'all'}", partial(draw_gpu.small_case, some)
    proof.require(name, draw_gpu.draw, _draw, case, rtol=0)
    return draw_gpu.draw(*args)


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


def noise(keys: Array, sampling: Sampling, vocab_size: int) -> Array:
    """[B,W,V] float32 Gumbel noise of each position's own key [B,W,2] uint32; zeros for greedy rows."""
    return noise_of(keys, sampling, jnp.arange(vocab_size, dtype=jnp.int32))


def noise_of(keys: Array, sampling: Sampling, token_ids: Array) -> Array:
    """[B,W,U]: the columns of `noise` that belong to some tokens [U]. Nothing is drawn when all rows are greedy."""

    def drawn() -> Array:
        return jnp.where(sampling.sampled[:, None, None], token_noise(keys, token_ids[None, None]), 0.0)

    nothing = lambda: jnp.zeros((*keys.shape[:2], token_ids.shape[0]), jnp.float32)
    return if_asked(sampling, "temperature", sampling.sampled, drawn, nothing)


def token_noise(keys: Array, token_ids: Array) -> Array:
    """float32 standard Gumbel noise of some tokens [...,U] under each key [...,2] uint32."""
    return threefry.gumbel(threefry.bits((keys[..., :1], keys[..., 1:]), token_ids.astype(jnp.uint32)))
