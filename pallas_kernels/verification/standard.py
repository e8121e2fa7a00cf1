"""Rejection sampling (Leviathan et al. 2022): drafts stand with probability min(1, p/q), the first rejected is redrawn.

What it needs of the logits [B,W,V] is little: the filters' thresholds, the sum of exponentials, p of the drafts, and
the one row at which a token is drawn. `Summary` holds the first two; the reference finds them in the processed logits,
the kernel in one pass over the raw ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import dispatch
from pallas_kernels.verification import reference
from pallas_kernels.verification.drawing import likeliest, token_noise
from pallas_kernels.verification.reference import leading
from pallas_kernels.verification.sampling import Sampling


class Summary(NamedTuple):
    """What filters and normalisation make of each row; the scale of logits is their own, before temperature."""

    likeliest: Array  # [B,W] int32, the greedy token
    lowest: Array  # [B,W] float32, the smallest logit that the filters keep
    total: Array  # [B,W] float32, log of the sum of exponentials of processed logits


def verify_standard(
    logits: Array, drafts: Array, q: Array, d2t: Array, uniform: Array, keys: Array, sampling: Sampling, *,
    implementation: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Tokens [B,W] int32 and accepted drafts [B] int32; tokens beyond row `accepted` mean nothing.

    Args:
      logits: [B,W,V]. drafts: [B,K] int32 target ids, K = W - 1, -1 for none. q: [B,K,U], what they were drawn from.
      d2t: [U] int32. uniform: [B,K] in (0, 1). keys: [B,W,2] uint32 for the redrawn token, independent of `uniform`.
      implementation: see `pallas_kernels.dispatch`; "tpu" finds the summary without processed logits. Not timed.
    """
    summary = dispatch.call(
        "verification.summary", implementation, {"reference": summarise, "tpu": _tpu}, logits, sampling
    )
    log_p = _log_p(logits, drafts, summary, sampling)
    log_q = jnp.log(jnp.where(d2t[None, None] == drafts[..., None], q, 0.0).sum(-1))
    passed = jnp.log(uniform) < log_p - log_q  # NaN (0/0) compares false
    passed = jnp.where(sampling.sampled[:, None], passed, summary.likeliest[:, :-1] == drafts) & (drafts >= 0)
    accepted = leading(passed)
    row = jax.tree.map(lambda x: _row(x, accepted), (logits, summary, keys, sampling.no_stop))
    drawn = _redraw(*row, drafts=drafts, q=q, d2t=d2t, accepted=accepted, sampling=sampling)
    final = jnp.where(sampling.sampled, drawn, row[1].likeliest[:, 0])
    stands = jnp.arange(logits.shape[1])[None] < accepted[:, None]
    return jnp.where(stands, jnp.pad(drafts, [(0, 0), (0, 1)]), final[:, None]), accepted


def summarise(logits: Array, sampling: Sampling) -> Summary:
    """The reference: from an array of processed logits."""
    processed = reference.process(logits, sampling)
    kept = jnp.where(processed > -jnp.inf, logits.astype(jnp.float32), jnp.inf)
    return Summary(likeliest(processed), kept.min(-1), jax.nn.logsumexp(processed, axis=-1))


def _tpu(*args: Any) -> Summary:
    from pallas_kernels.verification import tpu

    return Summary(*tpu.summary(*args))


def _processed(logits: Array, tokens: Array, summary: Summary, sampling: Sampling, no_stop: Array) -> Array:
    """Processed logits of some `tokens` [B,T,n], given their logits [B,T,n] and the summary [B,T] of their rows."""
    stops = (tokens[..., None] == sampling.stop_ids[:, None, None]).any(-1) & no_stop[..., None]
    kept = (logits >= summary.lowest[..., None]) & ~stops
    scale = jnp.where(sampling.sampled, sampling.temperature, 1.0)[:, None, None]
    return jnp.where(kept, logits.astype(jnp.float32) / scale, -jnp.inf)


def _log_p(logits: Array, drafts: Array, summary: Summary, sampling: Sampling) -> Array:
    """[B,K]: the target's log probability of each draft (of token 0 where there is none)."""
    rows = jax.tree.map(lambda x: x[:, :-1], (summary, sampling.no_stop))
    tokens = jnp.maximum(drafts, 0)[..., None]
    chosen = jnp.take_along_axis(logits[:, :-1], tokens, axis=-1)
    return _processed(chosen, tokens, rows[0], sampling, rows[1])[..., 0] - rows[0].total


def _redraw(
    logits: Array, summary: Summary, keys: Array, no_stop: Array, *, drafts: Array, q: Array, d2t: Array,
    accepted: Array, sampling: Sampling,
) -> Array:  # fmt: skip
    """[B] tokens from max(p - q, 0) at row `accepted`, whose [B,1,...] are given; from p where nothing was drafted."""
    vocab = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    processed = _processed(logits, vocab, summary, sampling, no_stop)
    p = jax.nn.softmax(processed[:, 0], axis=-1)
    known = jnp.pad(jnp.where(drafts[..., None] >= 0, q, 0.0), [(0, 0), (0, 1), (0, 0)])
    full = jnp.zeros(p.shape, q.dtype).at[:, d2t].set(_row(known, accepted)[:, 0])
    residual = jnp.maximum(p - full, 0.0)
    empty = ~(residual > 0).any(-1, keepdims=True)
    scores = jnp.where(empty, processed[:, 0], jnp.log(residual))
    return likeliest(scores + token_noise(keys, vocab)[:, 0])


def _row(x: Array, index: Array) -> Array:
    """[B,1,...]: row `index` [B] of x [B,W,...]."""
    return jnp.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)
