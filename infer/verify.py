"""Which drafts the target accepts, and where a text ends inside a window.

Three rules, chosen by `rejection_sample_method`:
  coupled    drafts are compared with the target's own samples (greedy or seeded): the text is that of plain
             sampling, token for token (Daliri, Musco and Suresh 2024, "Coupling without communication"); it is
             `pallas_kernels.verification.verify`
  standard   min(1, p/q) with a residual draw: the text has the right distribution (Leviathan et al. 2022); it is
             `pallas_kernels.verification.verify_standard`
  synthetic  a fixed acceptance length, whatever the drafts: for benchmarks; the text means nothing

Letters: B batch, K drafts, W = K + 1 window, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from enum import IntEnum

import jax.numpy as jnp
from jax import Array

from eagle3_jax.errors import UserError
from infer.sampling import Purpose, SamplingState, position_keys, uniform_open
from pallas_kernels import verification


class Reason(IntEnum):
    """Why a row ends."""

    NONE = 0
    STOP = 1
    LENGTH = 2


def verify_standard(
    processed: Array, drafts: Array, q: Array, d2t: Array, params: SamplingState, positions: Array
) -> tuple[Array, Array]:
    """Rejection sampling: (tokens [B, W] int32, accepted [B] int32); tokens beyond row `accepted` mean nothing.

    processed [B, W, V] logits from `process_logits`; drafts [B, K] target ids, -1 for none; q [B, K, U] the
    distributions that they were drawn from (one-hot for argmax drafts), over the draft vocabulary d2t [U];
    positions [B, W]. Draft x is accepted if log u < log p(x) - log q(x), u in (0, 1) and never 0, so a token of
    probability 0 never passes. The first rejection is replaced by a draw from max(p - q, 0), with noise independent
    of u; when all are accepted the last row's p is drawn from. Greedy rows compare with the argmax.
    """
    uniform = uniform_open(params, positions[:, :-1])
    keys = position_keys(params, positions, Purpose.RESIDUAL)
    return verification.verify_standard(processed, drafts, q, d2t, uniform, keys, _processed_already(params, positions))


def _processed_already(params: SamplingState, positions: Array) -> verification.Sampling:
    """The same rows, of which nothing is asked that `process_logits` has done."""
    off = jnp.zeros_like(params.temperature)
    heat, top_k = params.sampled.astype(jnp.float32), jnp.zeros_like(params.top_k)
    no_stop = jnp.zeros(positions.shape, jnp.bool_)
    return verification.Sampling(heat, off, top_k, off + 1, params.stop_ids, no_stop, asks=frozenset())


def verify_synthetic(
    samples: Array, drafts: Array, params: SamplingState, positions: Array, acceptance_length: float
) -> tuple[Array, Array]:
    """Accept drafts at the rate that gives `acceptance_length`: (tokens [B, W] int32, accepted [B] int32).

    What the drafts [B, K] are plays no part (but -1 is rejected); after the last accepted one comes the target's
    sample [B, W]. For the rates, and the lengths that are possible, see `synthetic_rates`.
    """
    rates = jnp.array(synthetic_rates(acceptance_length, drafts.shape[1]), jnp.float32)
    passed = uniform_open(params, positions[:, :-1]) < rates[None, :]
    accepted = verification.leading(passed & (drafts >= 0))
    final = jnp.take_along_axis(samples, accepted[:, None], 1)[:, 0]
    return _splice(drafts, final, accepted), accepted


def synthetic_rates(acceptance_length: float, num_drafts: int) -> tuple[float, ...]:
    """Conditional acceptance rates [K] whose mean acceptance length (the bonus counts) is the one asked for.

    vLLM's schedule of least variance: certain up to the whole part, one fraction, then none; 2.6 with K = 3 gives
    windows of 2 or 3 tokens only. Raises UserError unless 1 <= acceptance_length <= K + 1.
    """
    if not 1 <= acceptance_length <= num_drafts + 1:
        raise UserError(
            f"synthetic_acceptance_length={acceptance_length!r} is not allowed: with {num_drafts} drafts it must be "
            f"in [1, {num_drafts + 1}] (accepted drafts plus one)"
        )
    return tuple(min(max(acceptance_length - 1 - i, 0.0), 1.0) for i in range(num_drafts))


def truncate(tokens: Array, accepted: Array, stop_ids: Array, limit: Array) -> tuple[Array, Array]:
    """Where a window's text ends: (number of tokens that are emitted [B] int32, Reason [B] int32).

    In token order, the first stop id ends the text and is emitted itself; then the limit applies. tokens [B, W], of
    which `accepted + 1` count; stop_ids [B, n], padded with -1; limit [B]: how many more tokens the row may emit
    (0 for an idle row: nothing is emitted, reason LENGTH).
    """
    window = tokens.shape[1]
    count = accepted + 1
    index = jnp.arange(window, dtype=jnp.int32)[None, :]
    is_stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(-1) & (tokens >= 0) & (index < count[:, None])
    until_stop = jnp.where(is_stop, index + 1, window + 1).min(-1)
    emitted = jnp.minimum(jnp.minimum(until_stop, count), limit).astype(jnp.int32)
    reason = jnp.where(emitted >= limit, Reason.LENGTH, Reason.NONE)
    return emitted, jnp.where(until_stop <= emitted, Reason.STOP, reason).astype(jnp.int32)


# -------------------------------------------------------------------------------------------------- pieces


def _splice(drafts: Array, final: Array, accepted: Array) -> Array:
    """[B, W]: the accepted drafts, then `final` [B] (repeated in the rows that mean nothing)."""
    window = drafts.shape[1] + 1
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    is_accepted = jnp.arange(window)[None, :] < accepted[:, None]
    return jnp.where(is_accepted, padded, final[:, None]).astype(jnp.int32)
