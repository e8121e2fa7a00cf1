"""What the frozen target tells the drafter: aux states, and a teacher that never holds a [B, T, V] array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from eagle3_jax.sharding import Layout, current_layout
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
    with jax.named_scope("vocabulary"):
        choice = vocabulary_scan(target, out.hidden, vocab_block, log_sum)
    return lax.stop_gradient(Features(out.aux, out.hidden, *choice))


def vocabulary_scan(
    target: Target, hidden: Array, block: int | None = None, log_sum: bool = False
) -> tuple[Array, Array | None]:
    """argmax [B, T] int32 of `target.logits(hidden)` and, if asked for, their log-sum-exp, `block` logits at a time.

    On a mesh each device scans its part of the vocabulary for its rows.
    """
    tied, layout = target.config.tie_word_embeddings, current_layout()
    matrix = target.embed_tokens.weight[...] if tied else target.lm_head.kernel[...]
    hidden = lax.stop_gradient(hidden)  # a maximum over devices has no rule for a gradient
    if layout is None:
        found = _scan(hidden, matrix, tied, block, log_sum)
    else:
        found = _scan_on_mesh(layout, hidden, matrix, tied, block, log_sum)
    return found.place, None if found.total is None else found.top + jnp.log(found.total)


class _Scan(NamedTuple):
    """Of the logits so far, each [B, T]: the greatest, where it is, and the sum of e^(logit - greatest)."""

    top: Array
    place: Array
    total: Array | None


def _scan_on_mesh(layout: Layout, hidden: Array, matrix: Array, tied: bool, block: int | None, log_sum: bool) -> _Scan:
    rows = PartitionSpec(layout.row_axes(len(hidden)) or None)
    spec = layout.product_spec(("vocab", "embed") if tied else ("embed", "vocab"), matrix.shape, ())
    width, vocabulary = reversed(spec) if tied else spec

    def local(hidden: Array, matrix: Array) -> _Scan:
        found = _scan(hidden, matrix, tied, block, log_sum, width)
        return found if vocabulary is None else _join(found, vocabulary, matrix.shape[not tied])

    return jax.shard_map(local, mesh=layout.mesh, in_specs=(rows, spec), out_specs=rows, check_vma=False)(
        hidden, matrix
    )


def _join(found: _Scan, axis: str, size: int) -> _Scan:
    """Scans of parts of `size` tokens along a mesh axis as one; of equal logits the lowest id is the greatest."""
    top, place = lax.pmax(found.top, axis), found.place + lax.axis_index(axis) * size
    place = lax.pmin(jnp.where(found.top == top, place, jnp.iinfo(jnp.int32).max), axis)
    total = None if found.total is None else lax.psum(found.total * jnp.exp(found.top - top), axis)
    return _Scan(top, place, total)


def _scan(
    hidden: Array, matrix: Array, tied: bool, block: int | None, log_sum: bool, width: str | None = None
) -> _Scan:
    """Of hidden [B, T, D] and a matrix [D, V], or [V, D] if tied, of which a mesh axis may cut the `width`.

    The last block overlaps the one before where `block` does not divide V. A token seen twice wins only once, since
    later blocks must be strictly greater; in the sum it is left out.
    """
    shape, size = hidden.shape[:-1], matrix.shape[not tied]
    block = min(block or max(512, _BLOCK_ELEMENTS // math.prod(shape)), size)

    def visit(i: Array, best: _Scan) -> _Scan:
        start = jnp.minimum(i * block, size - block)
        logits = _block_logits(hidden, matrix, tied, start, block, width)
        top, index = jnp.max(logits, axis=-1), start + jnp.argmax(logits, axis=-1).astype(jnp.int32)
        better = top > best.top
        top, index = jnp.where(better, top, best.top), jnp.where(better, index, best.place)
        if best.total is None:
            return _Scan(top, index, None)
        fresh = (start + jnp.arange(block) >= i * block)[None, None]
        added = jnp.sum(jnp.where(fresh, jnp.exp(logits - top[..., None]), 0.0), axis=-1)
        return _Scan(top, index, best.total * jnp.exp(best.top - top) + added)

    total = jnp.zeros(shape, jnp.float32) if log_sum else None
    nothing = _Scan(jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32), total)
    return lax.fori_loop(0, -(-size // block), visit, nothing)


def _block_logits(hidden: Array, matrix: Array, tied: bool, start: Array, block: int, width: str | None) -> Array:
    """float32 [B, T, block]. A block is gathered over `width` only now: the whole would be gigabytes."""
    part = lax.dynamic_slice_in_dim(matrix, start, block, axis=int(not tied))
    if width is not None:
        part = lax.all_gather(part, width, axis=int(tied), tiled=True)
    return jnp.einsum("BTD,VD->BTV" if tied else "BTD,DV->BTV", hidden, part, preferred_element_type=jnp.float32)
