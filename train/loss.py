"""The loss of the training-time test, in chunks of tokens.

Everything is aligned with the teacher: at position s stands the target's distribution of token s+1. The guess of step i
for that token was made at p = s-1-i. So each chunk computes the teacher once and meets the guesses of every step, and
the backward pass computes the chunk again: no [B, T, U] array is kept, let alone one for each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from eagle3_jax.segments import segment_positions
from train.ttt import shift_left, shift_right

_CHUNK_ELEMENTS = 2**27


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepSums:
    """For each step, [n] float32 sums over the batch.

    loss: divergence over the counted positions. counted: supervised, and the target's choice can be drafted.
    supervised: see `supervised_run`. hits: supervised positions where the drafter guesses the target's choice.
    """

    loss: Array
    counted: Array
    supervised: Array
    hits: Array


def supervised_run(mask: Array, segment_ids: Array | None = None) -> Array:
    """[B, T] int32: how many of the assistant's tokens, of one turn, end with each token; a first token never counts.

    Step i may be trained on its guess of token t if and only if the run is at least i+2: then tokens p+1 .. p+2+i = t
    are all the assistant's, and of the segment of p. The first token, of a row or a segment, has no position before it
    that could have guessed from it.
    """
    index = jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
    mask = mask & ((index if segment_ids is None else segment_positions(segment_ids)) > 0)
    last_other = lax.cummax(jnp.where(mask, -1, index), axis=1)
    return jnp.where(mask, index - last_other, 0)


def chunked(function: Callable[..., Any], arrays: Sequence[tuple[Array, int]], size: int) -> Any:
    """Maps `function` over chunks of `size` along each array's given axis; results are stacked in front.

    The last chunk is filled up with zeros. Nothing of a chunk is kept for the backward pass but its inputs.
    """
    split = tuple(_to_chunks(x, axis, size) for x, axis in arrays)
    return lax.map(jax.checkpoint(lambda chunks: function(*chunks)), split)


def _to_chunks(x: Array, axis: int, size: int) -> Array:
    missing = -x.shape[axis] % size
    x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def chunk_size(length: int, rows: int, vocab_size: int) -> int:
    """Tokens at a time so that `rows` logits of each stay within half a gigabyte."""
    return min(length, max(1, _CHUNK_ELEMENTS // (rows * vocab_size)))


def step_sums(
    draft_logits: Callable[[Array], Array],
    outputs: Array,
    teacher_hidden: Array,
    teacher_kernel: Array,
    teacher_choice: Array,
    mask: Array,
    *,
    segment_ids: Array | None = None,
    chunk: int | None = None,
) -> StepSums:
    """Compares the drafter's guesses with the teacher.

    Args:
      draft_logits: the drafter's final norm and output projection, [..., D] -> float32 [..., U].
      outputs: [n, B, T, D] of `ttt.unroll`.
      teacher_hidden: [B, T, Dt], the target's, after its final norm.
      teacher_kernel: [Dt, U], its output projection for the draft vocabulary.
      teacher_choice: [B, T] int32, its argmax over the whole vocabulary as a draft id, -1 if it has none.
      mask: [B, T] bool, the assistant's tokens.
      segment_ids: [B, T] of packed rows.
    """
    steps, batch, length, _ = outputs.shape
    chunk = chunk or chunk_size(length, (steps + 1) * batch, teacher_kernel.shape[1])
    aligned = jnp.stack([shift_right(h, i + 1) for i, h in enumerate(outputs)])
    run = shift_left(supervised_run(mask, segment_ids), 1)

    def compare(hidden: Array, teacher: Array, choice: Array, run: Array) -> StepSums:
        logits = jnp.matmul(teacher, teacher_kernel, preferred_element_type=jnp.float32)
        log_teacher = jax.nn.log_softmax(logits)
        return _sum_steps(draft_logits(hidden), log_teacher, choice, run)

    sums = chunked(compare, [(aligned, 2), (teacher_hidden, 1), (teacher_choice, 1), (run, 1)], chunk)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def _sum_steps(logits: Array, log_teacher: Array, choice: Array, run: Array) -> StepSums:
    """logits [n, B, C, U], log_teacher [B, C, U], choice and run [B, C]."""
    needed = jnp.arange(2, 2 + len(logits))[:, None, None]
    supervised = run[None] >= needed
    counted = supervised & (choice >= 0)[None]
    divergence = _divergence(log_teacher[None], jax.nn.log_softmax(logits))
    hits = counted & (jnp.argmax(logits, axis=-1) == choice[None])
    # `where` and not a product: a padded place may hold anything, and 0 * nan is nan.
    parts = StepSums(jnp.where(counted, divergence, 0.0), counted, supervised, hits)
    return jax.tree.map(lambda x: jnp.sum(x, axis=(1, 2), dtype=jnp.float32), parts)


def _divergence(log_teacher: Array, log_draft: Array) -> Array:
    """Forward Kullback-Leibler divergence: the soft cross-entropy less the teacher's own entropy."""
    return jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_draft), axis=-1)


def total_loss(sums: StepSums, decay: float) -> Array:
    """The steps' means, each over its counted positions, weighted decay**i."""
    weights = decay ** jnp.arange(len(sums.loss), dtype=jnp.float32)
    return jnp.sum(weights * sums.loss / jnp.maximum(sums.counted, 1))
