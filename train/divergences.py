"""How far a drafter is from the target, from logits [..., U], with gradients written out.

Over a draft vocabulary of tens of thousands a loss is bound by memory: what counts is how often the logits are read.
Automatic differentiation keeps and rereads log-probabilities; the gradients here are one pass from the logits. Only the
drafter's logits have one, the target's are constants. Everything is float32.

Letters: n steps, U draft vocabulary. `teacher` is [..., U], `logits` [n, ..., U].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def _log_sum(logits: Array) -> Array:
    return jax.nn.logsumexp(logits, axis=-1, keepdims=True)


@jax.custom_vjp
def kl_divergence(teacher: Array, logits: Array) -> Array:
    """KL(softmax(teacher) || softmax(logits)) [n, ...]; its gradient is softmax(logits) - softmax(teacher)."""
    return _kl_forward(teacher, logits)[0]


def _kl_forward(teacher: Array, logits: Array) -> tuple[Array, tuple[Array, ...]]:
    teacher_sum, draft_sum = _log_sum(teacher), _log_sum(logits)
    log_p = (teacher - teacher_sum)[None]
    # Term by term: the sums of p log p and of p log q may be a thousand times their difference.
    value = jnp.sum(jnp.exp(log_p) * (log_p - (logits - draft_sum)), axis=-1)
    return value, (teacher, teacher_sum, logits, draft_sum)


def _kl_backward(kept: tuple[Array, ...], cotangent: Array) -> tuple[None, Array]:
    teacher, teacher_sum, logits, draft_sum = kept
    difference = jnp.exp(logits - draft_sum) - jnp.exp(teacher - teacher_sum)[None]
    return None, cotangent[..., None] * difference


kl_divergence.defvjp(_kl_forward, _kl_backward)


@jax.custom_vjp
def log_acceptance(log_target: Array, logits: Array) -> Array:
    """log sum min(p, q) [n, ...]: the chance that a token drafted from q = softmax(logits) is accepted.

    `log_target` [..., U] are log probabilities over the whole vocabulary, so they need not sum to one. In logarithms,
    since at the start of training the chance may be tiny. Where p equals q, the gradient takes q for greater.
    """
    return _acceptance_forward(log_target, logits)[0]


def _acceptance_forward(log_target: Array, logits: Array) -> tuple[Array, tuple[Array, ...]]:
    draft_sum = _log_sum(logits)
    value = _log_sum(jnp.minimum(log_target[None], logits - draft_sum))
    return value[..., 0], (log_target, logits, draft_sum, value)


def _acceptance_backward(kept: tuple[Array, ...], cotangent: Array) -> tuple[None, Array]:
    log_target, logits, draft_sum, value = kept
    log_draft = logits - draft_sum
    bound = jnp.where(log_draft < log_target[None], jnp.exp(log_draft - value), 0.0)
    slope = bound - jnp.exp(log_draft) * jnp.sum(bound, axis=-1, keepdims=True)
    return None, cotangent[..., None] * slope


log_acceptance.defvjp(_acceptance_forward, _acceptance_backward)
