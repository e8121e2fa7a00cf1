"""What the frozen target tells the drafter: aux states, and a teacher that never holds a [B, T, V] array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
    """

    aux: tuple[Array, ...]
    hidden: Array
    top1: Array


def target_features(
    target: Target,
    tokens: Array,
    aux_layers: Sequence[int],
    *,
    segment_ids: Array | None = None,
    vocab_block: int | None = None,
) -> Features:
    """Runs the target over tokens [B, T], without a cache. Rows are padded on the right, where causality hides it.

    segment_ids: [B, T] of packed rows, see `eagle3_jax.segments`.
    """
    out = target(tokens, segment_ids=segment_ids, aux_layers=aux_layers)
    block = vocab_block or max(512, _BLOCK_ELEMENTS // tokens.size)
    return lax.stop_gradient(Features(out.aux, out.hidden, vocabulary_argmax(target, out.hidden, block)))


def vocabulary_argmax(target: Target, hidden: Array, block: int) -> Array:
    """argmax of `target.logits(hidden)` [B, T] int32, with logits of `block` tokens at a time.

    The last block overlaps the one before where `block` does not divide V; a token seen twice wins only once, since
    later blocks must be strictly greater.
    """
    size = target.config.vocab_size
    block = min(block, size)

    def visit(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        start = jnp.minimum(i * block, size - block)
        logits = _block_logits(target, hidden, start, block)
        top, index = jnp.max(logits, axis=-1), start + jnp.argmax(logits, axis=-1).astype(jnp.int32)
        better = top > best[0]
        return jnp.where(better, top, best[0]), jnp.where(better, index, best[1])

    nothing = jnp.full(hidden.shape[:-1], -jnp.inf), jnp.zeros(hidden.shape[:-1], jnp.int32)
    return lax.fori_loop(0, -(-size // block), visit, nothing)[1]


def _block_logits(target: Target, hidden: Array, start: Array, block: int) -> Array:
    """float32 [B, T, block]."""
    if target.config.tie_word_embeddings:
        rows = lax.dynamic_slice_in_dim(target.embed_tokens.weight[...], start, block, axis=0)
        return jnp.einsum("BTD,VD->BTV", hidden, rows, preferred_element_type=jnp.float32)
    columns = lax.dynamic_slice_in_dim(target.lm_head.kernel[...], start, block, axis=1)
    return jnp.matmul(hidden, columns, preferred_element_type=jnp.float32)
