"""What the frozen target tells the drafter: aux states, and a teacher that never holds a [B, T, V] array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from eagle3_jax.target import Target

_BLOCK_ELEMENTS = 2**26


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """One batch seen by the target.

    aux: [B, T, D] for each boundary. hidden: [B, T, D] after the final norm, from which logits follow.
    top1: [B, T] int32, the argmax over the whole vocabulary: what greedy decoding would say next.
    log_sum: [B, T] float32, the log-sum-exp over the whole vocabulary, if asked for.
    """

    aux: tuple[Array, ...]
    hidden: Array
    top1: Array
    log_sum: Array | None = None


def target_features(
    target: Target,
    tokens: Array,
    aux_layers: Sequence[int],
    *,
    segment_ids: Array | None = None,
    log_sum: bool = False,
    vocab_block: int | None = None,
) -> Features:
    """Runs the target over tokens [B, T], without a cache. Rows are padded on the right, where causality hides it.

    segment_ids: [B, T] of packed rows, see `eagle3_jax.segments`.
    """
    with jax.named_scope("target"):
        out = target(tokens, segment_ids=segment_ids, aux_layers=aux_layers)
    block = vocab_block or max(512, _BLOCK_ELEMENTS // tokens.size)
    with jax.named_scope("vocabulary"):
        choice = vocabulary_scan(target, out.hidden, block, log_sum)
    return lax.stop_gradient(Features(out.aux, out.hidden, *choice))


def vocabulary_scan(target: Target, hidden: Array, block: int, log_sum: bool = False) -> tuple[Array, Array | None]:
    """argmax [B, T] int32 of `target.logits(hidden)` and, if asked for, their log-sum-exp, `block` logits at a time.

    The last block overlaps the one before where `block` does not divide V. A token seen twice wins only once, since
    later blocks must be strictly greater; in the sum it is left out.
    """
    size = target.config.vocab_size
    block = min(block, size)

    def visit(i: Array, best: _Scan) -> _Scan:
        start = jnp.minimum(i * block, size - block)
        logits = _block_logits(target, hidden, start, block)
        top, index = jnp.max(logits, axis=-1), start + jnp.argmax(logits, axis=-1).astype(jnp.int32)
        better = top > best.top
        top, index = jnp.where(better, top, best.top), jnp.where(better, index, best.place)
        if best.total is None:
            return _Scan(top, index, None)
        fresh = (start + jnp.arange(block) >= i * block)[None, None]
        added = jnp.sum(jnp.where(fresh, jnp.exp(logits - top[..., None]), 0.0), axis=-1)
        return _Scan(top, index, best.total * jnp.exp(best.top - top) + added)

    shape = hidden.shape[:-1]
    total = jnp.zeros(shape, jnp.float32) if log_sum else None
    nothing = _Scan(jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32), total)
    found = lax.fori_loop(0, -(-size // block), visit, nothing)
    return found.place, None if found.total is None else found.top + jnp.log(found.total)


class _Scan(NamedTuple):
    """Of the logits so far, each [B, T]: the greatest, where it is, and the sum of e^(logit - greatest)."""

    top: Array
    place: Array
    total: Array | None


def _block_logits(target: Target, hidden: Array, start: Array, block: int) -> Array:
    """float32 [B, T, block]."""
    if target.config.tie_word_embeddings:
        rows = lax.dynamic_slice_in_dim(target.embed_tokens.weight[...], start, block, axis=0)
        return jnp.einsum("BTD,VD->BTV", hidden, rows, preferred_element_type=jnp.float32)
    columns = lax.dynamic_slice_in_dim(target.lm_head.kernel[...], start, block, axis=1)
    return jnp.matmul(hidden, columns, preferred_element_type=jnp.float32)
