"""Which drafts the target accepts, and where a text ends inside a window.

Three rules, chosen by `rejection_sample_method`:
  coupled    drafts are compared with the target's own samples (greedy or seeded): the text is that of plain
             sampling, token for token (Daliri, Musco and Suresh 2024, "Coupling without communication"); it is
             `pallas_kernels.verification.verify`
  standard   min(1, p/q) with a residual draw: the text has the right distribution (Leviathan et al. 2022)
  synthetic  a fixed acceptance length, whatever the drafts: for benchmarks; the text means nothing

Letters: B batch, K drafts, W = K + 1 window, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import Array

from eagle3_jax.errors import UserError
from infer.sampling import Purpose, SamplingState, gumbel_noise, uniform_open


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
    greedy = jnp.argmax(processed, axis=-1).astype(jnp.int32)
    log_ratio = _log_p(processed, drafts) - _log_q(q, d2t, drafts)
    passed = jnp.log(uniform_open(params, positions[:, :-1])) < log_ratio  # NaN (0/0) compares false
    passed = jnp.where(params.sampled[:, None], passed, greedy[:, :-1] == drafts)
    accepted = _leading(passed & (drafts >= 0))
    drawn = _residual_sample(processed, q, d2t, drafts, accepted, params, positions)
    final = jnp.where(params.sampled, drawn, jnp.take_along_axis(greedy, accepted[:, None], 1)[:, 0])
    return _splice(drafts, final, accepted), accepted


def verify_synthetic(
    samples: Array, drafts: Array, params: SamplingState, positions: Array, acceptance_length: float
) -> tuple[Array, Array]:
    """Accept drafts at the rate that gives `acceptance_length`: (tokens [B, W] int32, accepted [B] int32).

    What the drafts [B, K] are plays no part (but -1 is rejected); after the last accepted one comes the target's
    sample [B, W]. For the rates, and the lengths that are possible, see `synthetic_rates`.
    """
    rates = jnp.array(synthetic_rates(acceptance_length, drafts.shape[1]), jnp.float32)
    passed = uniform_open(params, positions[:, :-1]) < rates[None, :]
    accepted = _leading(passed & (drafts >= 0))
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


def _leading(passed: Array) -> Array:
    """[B, K] bool -> [B] int32: the number of leading True."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)


def _splice(drafts: Array, final: Array, accepted: Array) -> Array:
    """[B, W]: the accepted drafts, then `final` [B] (repeated in the rows that mean nothing)."""
    window = drafts.shape[1] + 1
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    is_accepted = jnp.arange(window)[None, :] < accepted[:, None]
    return jnp.where(is_accepted, padded, final[:, None]).astype(jnp.int32)


def _log_p(processed: Array, drafts: Array) -> Array:
    """[B, K]: the target's log probability of each draft (of token 0 where there is none)."""
    rows = processed[:, :-1]
    chosen = jnp.take_along_axis(rows, jnp.maximum(drafts, 0)[:, :, None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(rows, axis=-1)


def _log_q(q: Array, d2t: Array, drafts: Array) -> Array:
    """[B, K]: the drafter's log probability of each draft, looked up by target id."""
    return jnp.log(jnp.where(d2t[None, None, :] == drafts[:, :, None], q, 0.0).sum(-1))


def _residual_sample(
    processed: Array, q: Array, d2t: Array, drafts: Array, accepted: Array, params: SamplingState, positions: Array
) -> Array:
    """[B] tokens drawn at row `accepted`: from max(p - q, 0), or from p where nothing was drafted or is left."""
    vocab_size = processed.shape[-1]
    row_logits = jnp.take_along_axis(processed, accepted[:, None, None], axis=1)[:, 0]
    p = jax.nn.softmax(row_logits, axis=-1)
    # A row K of zeros: the bonus, and a draft of -1, leave p as it is.
    q = jnp.where(drafts[:, :, None] >= 0, q, 0.0)
    q_row = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), accepted[:, None, None], axis=1)[:, 0]
    q_full = jnp.zeros((q.shape[0], vocab_size), q.dtype).at[:, d2t].set(q_row)
    residual = jnp.maximum(p - q_full, 0.0)
    empty = ~(residual > 0).any(-1, keepdims=True)
    log_residual = jnp.where(empty, row_logits, jnp.log(residual))
    noise = gumbel_noise(params, jnp.take_along_axis(positions, accepted[:, None], 1), vocab_size, Purpose.RESIDUAL)
    return jnp.argmax(log_residual + noise[:, 0], axis=-1).astype(jnp.int32)
