"""Which tokens min_p, top_k and top_p keep, without sorting a vocabulary: thresholds on the order of the logits.

Letters: B batch, W window, V vocabulary. Logits [B,W,V] float32; parameters [B,1], 0 = off; results [B,W] uint32: the
least `ordered_bits` of a logit that is kept, 0 where the filter is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import dispatch, proof

BITS = 4  # of a threshold, found in one sweep over the logits: 8 sweeps of 15 sums each, which XLA fuses


def kept(logits: Array, least: Array) -> Array:
    """The logits whose `ordered_bits` are at least those of their row; -inf in place of the others."""
    return jnp.where(ordered_bits(logits) >= least[..., None], logits, -jnp.inf)


def least_min_p(logits: Array, min_p: Array) -> Array:
    """Tokens at least `min_p` times as likely as the likeliest."""
    return jnp.where(min_p > 0, ordered_bits(logits.max(-1) + jnp.log(min_p)), 0)


def least_top_k(logits: Array, top_k: Array) -> Array:
    """The `top_k` likeliest tokens and those that tie with the last of them."""
    vocab_size = logits.shape[-1]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), 0)  # off: nothing to search for
    wanted = jnp.broadcast_to(wanted, logits.shape[:-1]).astype(jnp.float32)
    return jnp.where(top_k > 0, threshold(logits, None, wanted), 0)


def least_top_p(logits: Array, top_p: Array) -> Array:
    """The fewest likeliest tokens with mass `top_p` of what is left, and those that tie with the last of them.

    A row without top_p keeps even tokens too unlikely to change a float32 sum: what its neighbours ask for must not
    change its text.
    """
    share = jnp.broadcast_to(top_p, logits.shape[:-1])
    return jnp.where(top_p > 0, threshold(logits, logits.max(-1), share), 0)


def threshold(logits: Array, top: Array | None, wanted: Array, *, implementation: str | None = None) -> Array:
    """uint32 [B,W]: the largest t for which the tokens with `ordered_bits` of at least t weigh no less than is wanted.

    Args:
      logits: [B,W,V] float32. top: [B,W], the largest of each row: a token weighs exp(logit - top), and wanted [B,W]
        float32 is a share of what all weigh. None: each token weighs 1, and wanted is how many.
      implementation: see `pallas_kernels.dispatch`. "gpu", the default on GPUs, reads the logits twice, or 13 times
        where many lie near the threshold, and adds in another order: where a token's cumulative mass is within rounding
        of what is wanted, it may draw the line at a token beside. What it does with NaN is not defined.
    """
    choice = {"reference": _threshold, "gpu": _threshold_gpu}
    return dispatch.call("verification.threshold", implementation, choice, logits, top, wanted, default="gpu")


def _threshold(logits: Array, top: Array | None, wanted: Array) -> Array:
    weight = jnp.float32(1) if top is None else jnp.exp(logits - top[..., None])
    wanted = wanted if top is None else wanted * weight.sum(-1)  # type: ignore[union-attr]
    enough = lambda kept: jnp.where(kept, weight, 0.0).sum(-1) >= wanted
    return largest_threshold(ordered_bits(logits), enough)


def _threshold_gpu(*args: Any) -> Array:
    dispatch.require_gpu()
    from pallas_kernels.verification import thresholds_gpu  # Pallas takes a while to import

    proof.require("threshold on this GPU", thresholds_gpu.threshold, _threshold, thresholds_gpu.small_case, rtol=0)
    return thresholds_gpu.threshold(*args)


def ordered_bits(x: Array) -> Array:
    """uint32 with the order of the float32 `x`: a > b if and only if bits(a) > bits(b), and equal for 0 and -0."""
    word = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(word >> 31 == 1, ~word, word | jnp.uint32(1 << 31))


def largest_threshold(ordered: Array, enough: Callable[[Array], Array]) -> Array:
    """[B,W] uint32: the largest t for which `enough(ordered >= t)` holds; `enough` must hold for t = 0.

    `enough` maps [B,W,V] bool to [B,W] bool and must be monotone: a set that contains enough is enough. Float sums over
    the vocabulary are, since rounding is monotone and the order of addition is the same for every threshold.
    """

    def decide_digit(step: Array, threshold: Array) -> Array:
        shift = (32 - BITS * (step + 1)).astype(jnp.uint32)
        candidates = [threshold + (jnp.uint32(digit) << shift) for digit in range(1, 1 << BITS)]
        held = [enough(ordered >= candidate[..., None]).astype(jnp.uint32) for candidate in candidates]
        return threshold + (sum(held[1:], held[0]) << shift)

    return lax.fori_loop(0, 32 // BITS, decide_digit, jnp.zeros(ordered.shape[:-1], jnp.uint32))
