"""The loss of the training-time test, in chunks of tokens.

Everything is aligned with the teacher: at position s stands the target's distribution of token s+1. The guess of step i
for that token was made at p = s-1-i. So each chunk computes the teacher once and meets the guesses of every step, and
the backward pass computes the chunk again: no [B, T, U] array is kept, let alone one for each step. On a mesh each
device has its own tokens and its own chunks of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import Partial

from eagle3_jax.segments import segment_positions
from train.divergences import kl_divergence, log_acceptance
from train.objective import KL, Objective, smooth_l1, step_means
from train.spread import over_tokens
from train.ttt import shift_left, shift_right

_CHUNK_ELEMENTS = 2**27


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepSums:
    """For each step, [n] float32 sums over the batch.

    loss: divergence, or -log acceptance, over the counted positions. counted: supervised, and the target's choice can
    be drafted. supervised: see `supervised_run`. hits: supervised positions where the drafter guesses the target's
    choice. accepted: chances of acceptance over the counted positions, if the objective needs them. distance: of hidden
    states over the supervised positions, if the objective weighs it.
    """

    loss: Array
    counted: Array
    supervised: Array
    hits: Array
    accepted: Array | None = None
    distance: Array | None = None


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
    objective: Objective = KL,
    teacher_log_sum: Array | None = None,
    normed: Callable[[Array], Array] | None = None,
    chunk: int | None = None,
) -> StepSums:
    """Compares the drafter's guesses with the teacher.

    Args:
      draft_logits: the drafter's final norm and output projection, [..., D] -> float32 [..., U]. On a mesh a
        `jax.tree_util.Partial` of its arrays; so is `normed`.
      outputs: [n, B, T, D] of `ttt.unroll`.
      teacher_hidden: [B, T, Dt], the target's, after its final norm.
      teacher_kernel: [Dt, U], its output projection for the draft vocabulary.
      teacher_choice: [B, T] int32, its argmax over the whole vocabulary as a draft id, -1 if it has none.
      mask: [B, T] bool, the assistant's tokens.
      segment_ids: [B, T] of packed rows.
      teacher_log_sum: [B, T], log-sum-exp of the teacher's logits over the whole vocabulary, if the objective needs
        acceptance.
      normed: the drafter's final norm, [..., D] -> [..., Dt], if the objective weighs hidden states.
    """
    steps = len(outputs)
    aligned = jnp.stack([shift_right(h, i + 1) for i, h in enumerate(outputs)])
    run = shift_left(supervised_run(mask, segment_ids), 1)

    def compare(whole: _Whole, hidden: Array, teacher: Array, choice: Array, run: Array, *log_sum: Array) -> StepSums:
        logits = jnp.matmul(teacher, whole.teacher_kernel, preferred_element_type=jnp.float32)
        sums = _sum_steps(whole.draft_logits(hidden), logits, log_sum[0] if log_sum else None, choice, run, objective)
        if not objective.hidden_weight or whole.normed is None:
            return sums
        supervised, _ = _positions(run, choice, steps)
        far = jnp.where(supervised, smooth_l1(whole.normed(hidden), teacher[None]), 0.0)
        return dataclasses.replace(sums, distance=jnp.sum(far, axis=(1, 2)))

    arrays = [(aligned, 2), (teacher_hidden, 1), (teacher_choice, 1), (run, 1)]
    if objective.needs_acceptance:
        if teacher_log_sum is None:
            raise ValueError(f"{objective.kind} needs teacher_log_sum")
        arrays.append((teacher_log_sum, 1))
    axes = [axis for _, axis in arrays]

    def sums_of(whole: _Whole, *parts: Array) -> StepSums:
        _, batch, length, _ = parts[0].shape
        size = chunk or chunk_size(length, (steps + 1) * batch, teacher_kernel.shape[1])
        sums = chunked(partial(compare, whole), list(zip(parts, axes, strict=True)), size)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

    whole = _Whole(_as_tree(draft_logits), None if normed is None else _as_tree(normed), teacher_kernel)
    with jax.named_scope("loss"):
        return over_tokens(sums_of, whole, arrays)


class _Whole(NamedTuple):
    """See `step_sums`."""

    draft_logits: Partial
    normed: Partial | None
    teacher_kernel: Array


def _as_tree(function: Callable[[Array], Array]) -> Partial:
    return function if isinstance(function, Partial) else Partial(function)


def _positions(run: Array, choice: Array, num_steps: int) -> tuple[Array, Array]:
    """(supervised, counted), bool [n, B, C], from runs shifted to the teacher's position and its choices [B, C]."""
    supervised = run[None] >= jnp.arange(2, 2 + num_steps)[:, None, None]
    return supervised, supervised & (choice >= 0)[None]


def step_counts(
    choice: Array, mask: Array, num_steps: int, segment_ids: Array | None = None, *, objective: Objective = KL
) -> StepSums:
    """The sums as far as they are known before the drafter has run; see `step_sums` for the arguments."""
    places = _positions(shift_left(supervised_run(mask, segment_ids), 1), choice, num_steps)
    supervised, counted = (jnp.sum(x, axis=(1, 2), dtype=jnp.float32) for x in places)
    none = jnp.zeros_like(counted)
    accepted = none if objective.needs_acceptance else None
    return StepSums(none, counted, supervised, none, accepted, none if objective.hidden_weight else None)


def _sum_steps(
    logits: Array, teacher: Array, log_sum: Array | None, choice: Array, run: Array, objective: Objective
) -> StepSums:
    """logits [n, B, C, U], the teacher's [B, C, U], log_sum, choice and run [B, C]."""
    supervised, counted = _positions(run, choice, len(logits))
    at_choice = jnp.take_along_axis(logits, jnp.maximum(choice, 0)[None, ..., None], axis=-1)[..., 0]
    hits = counted & (at_choice == jnp.max(logits, axis=-1))
    accepted = None if log_sum is None else log_acceptance(teacher - log_sum[..., None], logits)
    if objective.kind == "lk_alpha" and accepted is not None:
        loss = -accepted
    else:
        loss = kl_divergence(teacher, logits)
    # `where` and not a product: a padded place may hold anything, and 0 * nan is nan.
    chance = None if accepted is None else jnp.where(counted, jnp.exp(accepted), 0.0)
    parts = StepSums(jnp.where(counted, loss, 0.0), counted, supervised, hits, chance)
    return jax.tree.map(lambda x: jnp.sum(x, axis=(1, 2), dtype=jnp.float32), parts)


def total_loss(sums: StepSums, decay: float, objective: Objective = KL) -> Array:
    """The steps' means, each over its counted positions, weighted decay**i; distances over the supervised ones."""
    weights = decay ** jnp.arange(len(sums.loss), dtype=jnp.float32)
    means = step_means(objective, sums.loss, sums.accepted, sums.counted)
    if sums.distance is not None:
        means = means + objective.hidden_weight * sums.distance / jnp.maximum(sums.supervised, 1)
    return jnp.sum(weights * means)
