"""The cycle: draft K tokens, run the target once on the window, verify, commit.

Pure functions of (models, state). The state of a batch is one registered dataclass, returned by every function; shapes
are static: B slots, K drafts, W = K + 1 window rows. With no drafter the same cycle runs with K = 0.

Of a slot with `lengths` n known tokens, the target's cache holds n - 1: the last token is the first of the next window.
The drafter's input at position p is the target's features of p with the token at p + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from eagle3_jax.cache import Cache
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.target import Target
from infer.sampling import (
    Purpose,
    SamplingState,
    draft_sample,
    position_keys,
    process_logits,
    sample,
)
from infer.verify import truncate, verify_standard, verify_synthetic
from pallas_kernels import verification

FROM_PREFILL = -1
FROM_TARGET = 64
MAX_DRAFTS = FROM_TARGET - 1  # codes are int8: 64 + 63 is the largest


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How to guess and how to judge; static, so part of the compiled program.

    num_drafts: K, 0 without a drafter. draft_sample_method: coupled, greedy (or probabilistic, for `standard`).
    rejection_sample_method: coupled, standard, synthetic. synthetic_acceptance_length: mean, for synthetic only.
    """

    num_drafts: int = 0
    draft_sample_method: str = "coupled"
    rejection_sample_method: str = "coupled"
    synthetic_acceptance_length: float | None = None

    @property
    def window(self) -> int:
        return self.num_drafts + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a batch of B slots is. `tokens` and `codes` have room for a window beyond the longest sequence.

    `codes` say where each token came from: -1 prefill, i < 64 the accepted draft i, 64 + a the target's own token after
    a accepted drafts. Every counter of speculation follows from them.
    """

    tokens: Array  # [B,S] int32, prompt and continuation
    codes: Array  # [B,S] int8
    prompt_lengths: Array  # [B] int32, 0 in an idle slot
    lengths: Array  # [B] int32, known tokens
    limits: Array  # [B] int32, length at which the slot stops
    active: Array  # [B] bool, generating
    reasons: Array  # [B] int32, 0 none, 1 stop token, 2 length
    target: Cache
    drafter: Cache | None
    features: Array | None  # [B,W,D] drafter features of the last committed window
    num_features: Array  # [B] int32, how many of them count
    sampling: SamplingState

    @property
    def prefilling(self) -> Array:
        """[B] bool: slots whose prompt is not wholly in the cache yet."""
        return self.target.lengths < self.prompt_lengths

    def take(self, slots: Array) -> DecodeState:
        """The state of some `slots` [n] int32 alone; those that do not exist are idle."""
        rows = lambda x: x.take(slots) if _is_cache(x) else jnp.take(x, slots, axis=0, mode="clip")
        part: DecodeState = jax.tree.map(rows, self, is_leaf=_is_cache)
        real = slots < self.lengths.shape[0]
        return dataclasses.replace(part, prompt_lengths=jnp.where(real, part.prompt_lengths, 0))

    def put(self, slots: Array, part: DecodeState) -> DecodeState:
        """Puts what `take` gave back in its place."""
        rows = lambda old, new: old.put(slots, new) if _is_cache(old) else old.at[slots].set(new, mode="drop")
        whole: DecodeState = jax.tree.map(rows, self, part, is_leaf=_is_cache)
        return whole


def _is_cache(x: Any) -> bool:
    return isinstance(x, Cache)


def prefill(
    target: Target, drafter: Eagle3 | None, state: DecodeState, chunk: int, slots: Array | None = None
) -> DecodeState:
    """Takes in the next `chunk` prompt tokens of every slot that has any; slots at their end get their first token.

    slots: [n] int32, to look at these alone (others cost as much as those with a prompt do). Those that do not exist
    fill up the number that a program was compiled for.
    """
    if slots is not None:
        return state.put(slots, prefill(target, drafter, state.take(slots), chunk))
    done = state.target.lengths
    count = jnp.where(state.prefilling, jnp.clip(state.prompt_lengths - done, 0, chunk), 0)
    last = state.prefilling & (done + count == state.prompt_lengths)
    aux_layers = drafter.config.aux_layers if drafter is not None else ()
    out, cache = target.prefill(_slice(state.tokens, done, chunk), count, state.target, aux_layers=aux_layers)
    state = dataclasses.replace(state, target=cache)
    end = jnp.maximum(count - 1, 0)
    if drafter is not None and state.features is not None:
        # The last prompt token's features wait for the token that follows it, which is only sampled below.
        features = drafter.combine(out.aux)
        known = count - last.astype(jnp.int32)
        _, draft_state = _extend(target, drafter, state, features, done, known)
        first = jnp.where(last[:, None, None], _pick(features, end)[:, None], state.features[:, :1])
        features = jnp.concatenate([first, state.features[:, 1:]], axis=1)
        state = dataclasses.replace(state, drafter=draft_state, features=features)
    tokens = _first_token(target, state, _pick(out.hidden, end))
    accepted = jnp.zeros_like(count)
    room = state.limits - state.lengths
    emitted, reasons = truncate(tokens, accepted, state.sampling.stop_ids, room)
    codes = jnp.full(tokens.shape, FROM_PREFILL, jnp.int8)
    state = dataclasses.replace(state, num_features=jnp.where(last, 1, state.num_features), active=state.active | last)
    return _emit(state, tokens, codes, jnp.where(last, emitted, 0), reasons)


def _first_token(target: Target, state: DecodeState, hidden: Array) -> Array:
    return sample(target.logits(hidden[:, None]), state.sampling, state.prompt_lengths[:, None])


def cycle(target: Target, drafter: Eagle3 | None, state: DecodeState, how: Speculation) -> DecodeState:
    """One cycle of every active slot: at least one token each, at most K + 1."""
    positions = state.lengths[:, None] + jnp.arange(how.window, dtype=jnp.int32)[None]
    drafts = jnp.zeros((positions.shape[0], 0), jnp.int32)
    draft_probs = None
    if drafter is not None:
        with jax.named_scope("draft"):
            drafts, draft_probs, cache = _draft(target, drafter, state, positions, how)
        state = dataclasses.replace(state, drafter=cache)
    with jax.named_scope("target"):
        last = _slice(state.tokens, state.lengths - 1, 1)
        aux_layers = drafter.config.aux_layers if drafter is not None else ()
        out, cache = target.window(jnp.concatenate([last, drafts], axis=1), state.target, aux_layers=aux_layers)
    with jax.named_scope("logits"):
        logits = target.logits(out.hidden)
    with jax.named_scope("verify"):
        tokens, accepted = _judge(logits, drafts, draft_probs, drafter, state, positions, how)
        emitted, reasons = truncate(tokens, accepted, state.sampling.stop_ids, state.limits - state.lengths)
    emitted = jnp.where(state.active, emitted, 0)
    state = dataclasses.replace(state, target=cache.commit(emitted))
    if drafter is not None:
        state = dataclasses.replace(state, features=drafter.combine(out.aux), num_features=emitted)
    row = jnp.arange(how.window, dtype=jnp.int32)[None]
    codes = jnp.where(row < accepted[:, None], row, FROM_TARGET + accepted[:, None]).astype(jnp.int8)
    return _emit(state, tokens, codes, emitted, reasons)


def run_cycles(
    target: Target, drafter: Eagle3 | None, state: DecodeState, how: Speculation, limit: Array, enough_idle: Array,
    asks: verification.Asks = None,
) -> DecodeState:  # fmt: skip
    """Up to `limit` cycles on the device; fewer when no slot is active, or when `enough_idle` of them are not.

    asks: all that any active slot asks of the sampler, if that is known; see `verification.Sampling`.
    """
    state = dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, asks=asks))

    def going(carry: tuple[Array, DecodeState]) -> Array:
        count, current = carry
        active = jnp.sum(current.active)
        return (count < limit) & (active > 0) & (current.active.size - active < enough_idle)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        return carry[0] + 1, cycle(target, drafter, carry[1], how)

    state = lax.while_loop(going, body, (jnp.int32(0), state))[1]
    return dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, asks=None))


def _draft(
    target: Target, drafter: Eagle3, state: DecodeState, positions: Array, how: Speculation
) -> tuple[Array, Array, Cache]:
    """Drafts [B,K] (target ids), their distributions [B,K,U], and the drafter's cache.

    The first pass rewrites the cache for the tokens accepted last time, from the target's true features. The later
    ones run on the drafter's own output; what they write is overwritten by the next cycle's first pass.
    """
    assert state.features is not None
    start = state.target.lengths - state.num_features
    hidden, cache = _extend(target, drafter, state, state.features, start, state.num_features)
    hidden = _pick(hidden, jnp.maximum(state.num_features - 1, 0))[:, None]
    choose = _draft_chooser(drafter, state, positions, how)
    drafts: list[Array] = []
    probs: list[Array] = []
    for i in range(how.num_drafts):
        if i > 0:
            at = state.target.lengths[:, None] + (i - 1)
            embeds = embed(target, drafter, drafts[-1][:, None])
            valid = jnp.broadcast_to(state.active[:, None], at.shape)
            hidden, cache = drafter.cached_block(embeds, drafter.feedback(hidden), at, valid, cache)
        token, q = choose(drafter.logits(hidden[:, 0]), i)
        drafts.append(token)
        probs.append(q)
    return jnp.stack(drafts, axis=1), jnp.stack(probs, axis=1), cache


def _draft_chooser(
    drafter: Eagle3, state: DecodeState, positions: Array, how: Speculation
) -> Callable[[Array, int], tuple[Array, Array]]:
    def choose(logits: Array, i: int) -> tuple[Array, Array]:
        method: Any = how.draft_sample_method
        return draft_sample(logits, drafter.d2t[...], state.sampling, positions[:, i], method=method)

    return choose


def _extend(
    target: Target, drafter: Eagle3, state: DecodeState, features: Array, start: Array, count: Array
) -> tuple[Array, Cache]:
    """Runs the drafter over true features [B,T,D] of positions from `start` [B]; the first `count` [B] are written."""
    assert state.drafter is not None
    steps = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
    next_tokens = _slice(state.tokens, start + 1, features.shape[1])
    embeds = embed(target, drafter, next_tokens)
    return drafter.cached_block(embeds, features, start[:, None] + steps, steps < count[:, None], state.drafter)


def embed(target: Target, drafter: Eagle3, token_ids: Array) -> Array:
    """Embeddings for the drafter: the target's own, unless the head carries its own."""
    return drafter.embed_tokens(token_ids) if drafter.config.own_embedding else target.embed(token_ids)


def _judge(
    logits: Array,
    drafts: Array,
    draft_probs: Array | None,
    drafter: Eagle3 | None,
    state: DecodeState,
    positions: Array,
    how: Speculation,
) -> tuple[Array, Array]:
    """Tokens [B,W] and the number of accepted drafts [B], from the target's logits [B,W,V]."""
    sampling, method = state.sampling, how.rejection_sample_method
    if drafter is None or draft_probs is None or method == "coupled":
        keys = position_keys(sampling, positions, Purpose.TOKEN)
        return verification.verify(logits, drafts, keys, sampling.at(positions))
    if method == "standard":
        processed = process_logits(logits, sampling, positions)
        return verify_standard(processed, drafts, draft_probs, drafter.d2t[...], sampling, positions)
    assert how.synthetic_acceptance_length is not None
    samples = sample(logits, sampling, positions)
    return verify_synthetic(samples, drafts, sampling, positions, how.synthetic_acceptance_length)


def _emit(state: DecodeState, tokens: Array, codes: Array, emitted: Array, reasons: Array) -> DecodeState:
    """Appends the first `emitted` [B] of `tokens` [B,W] to each slot and stops those with a reason."""
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    column = jnp.where(steps < emitted[:, None], state.lengths[:, None] + steps, state.tokens.shape[1])
    ended = (emitted > 0) & (reasons > 0)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[row, column].set(tokens, mode="drop"),
        codes=state.codes.at[row, column].set(codes, mode="drop"),
        lengths=state.lengths + emitted,
        reasons=jnp.where(ended, reasons, state.reasons),
        active=state.active & ~ended,
    )


def _slice(x: Array, start: Array, count: int) -> Array:
    """[B,count] of each row of x [B,S] from its own start; reads past the end are clipped, never out of bounds."""
    index = jnp.clip(start[:, None] + jnp.arange(count, dtype=jnp.int32)[None], 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index, axis=1)


def _pick(x: Array, index: Array) -> Array:
    """[B,D]: row `index` [B] of x [B,T,D]."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
