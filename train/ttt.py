"""EAGLE-3's training-time test: the drafter as it runs at inference, unrolled from every position at once.

Step i at position p takes the embedding of token p+1+i and, for i > 0, its own output of step i-1; it stands at rotary
position p+i and predicts token p+2+i. Tokens are the text's own (teacher forcing), hidden states the drafter's.

In packed rows positions and attention are a segment's own. Only the tokens that a step takes may lie in the next
segment: then so does the one it predicts, and `loss.supervised_run` leaves that step out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.segments import segment_positions
from pallas_kernels.attention import branch_attention

LayerKeys = tuple[Array, ...]
"""One [B, T, K, H] for each layer of the drafter."""


def shift_left(x: Array, by: int, axis: int = 1) -> Array:
    """What stands `by` places further right; zeros at the end."""
    return _shift(x, (0, by), axis, slice(by, None))


def shift_right(x: Array, by: int, axis: int = 1) -> Array:
    """What stands `by` places further left; zeros at the start."""
    return _shift(x, (by, 0), axis, slice(None, x.shape[axis]))


def _shift(x: Array, pad: tuple[int, int], axis: int, keep: slice) -> Array:
    padded = jnp.pad(x, [pad if i == axis else (0, 0) for i in range(x.ndim)])
    return padded[(slice(None),) * axis + (keep,)]


def draft_step(
    drafter: Eagle3,
    embeds: Array,
    hidden: Array,
    step: int,
    keys: Sequence[LayerKeys],
    values: Sequence[LayerKeys],
    segment_ids: Array | None = None,
) -> tuple[Array, LayerKeys, LayerKeys]:
    """One step from every position: (output [B, T, D], and the keys and values it leaves, for each layer).

    embeds: [B, T, D], of token p+1+step. hidden: the features, or what was fed back. keys, values: of earlier steps.
    segment_ids: [B, T] of packed rows, see `eagle3_jax.segments`.
    """
    new_keys: list[Array] = []
    new_values: list[Array] = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        new_keys.append(k)
        new_values.append(v)
        all_keys, all_values = [*(s[layer] for s in keys), k], [*(s[layer] for s in values), v]
        with jax.named_scope("draft_attention"):
            return branch_attention(q, all_keys, all_values, segment_ids=segment_ids)

    whole = jnp.broadcast_to(jnp.arange(embeds.shape[1], dtype=jnp.int32)[None], embeds.shape[:2])
    positions = whole if segment_ids is None else segment_positions(segment_ids)
    out = drafter.block(embeds, hidden, positions + step, attend)
    return out, tuple(new_keys), tuple(new_values)


def unroll(
    merge: Callable[[], Eagle3],
    embeds: Array,
    aux: Sequence[Array],
    num_steps: int,
    *,
    segment_ids: Array | None = None,
    remat: bool = False,
) -> Array:
    """The drafter's outputs before its final norm, [n, B, T, D].

    merge: makes the drafter of its parameters; called anew each step, see `DraftGraph.merge`.
    embeds: [B, T, D], the embedding of each token at its own position. aux: the target's states.
    segment_ids: [B, T] of packed rows.
    remat: the backward pass computes each step again instead of keeping its activations.
    """

    def one(hidden: Array, shifted: Array, step: int, keys: Sequence[LayerKeys], values: Sequence[LayerKeys]) -> tuple:
        with jax.named_scope("draft_step"):
            return draft_step(merge(), shifted, hidden, step, keys, values, segment_ids)

    run = jax.checkpoint(one, static_argnums=2) if remat else one
    hidden, outputs = merge().combine(aux), []
    keys: list[LayerKeys] = []
    values: list[LayerKeys] = []
    for step in range(num_steps):
        out, k, v = run(hidden, shift_left(embeds, step + 1), step, tuple(keys), tuple(values))
        keys.append(k)
        values.append(v)
        outputs.append(out)
        hidden = merge().feedback(out)
    return jnp.stack(outputs)
