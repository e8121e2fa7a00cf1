"""What is minimised at each step: a divergence of the drafter from the target, or the acceptance it stands for.

p is the target's distribution, q the drafter's, over the draft vocabulary. The divergence takes p renormalised to that
vocabulary, acceptance takes p as it is: tokens that cannot be drafted are never accepted. So do SpecForge's LK losses,
whose definitions and defaults these are (specforge/core/lk_loss.py).

    kl          KL(p || q)
    lk_alpha    -log a,  a = sum min(p, q): the chance that a token drafted from q is accepted
    lk_lambda   w KL + (1 - w) (1 - a),  w = kl_scale exp(-kl_decay a), held constant: KL first, acceptance as it grows

In lk_lambda KL and a are a step's means over its counted positions; the others are means of what they are at each.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

Kind = Literal["kl", "lk_alpha", "lk_lambda"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """See the module; `kl_scale` and `kl_decay` are of lk_lambda alone."""

    kind: Kind = "kl"
    kl_scale: float = 1.0
    kl_decay: float = 1.0

    @property
    def needs_acceptance(self) -> bool:
        return self.kind != "kl"


KL = Objective()


def divergence(log_teacher: Array, log_draft: Array) -> Array:
    """Forward Kullback-Leibler divergence [...] of log probabilities [..., U]."""
    return jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_draft), axis=-1)


def log_acceptance(log_target: Array, log_draft: Array) -> Array:
    """log sum min(p, q) [...]: in logarithms, since at the start of training it may be tiny."""
    return jax.nn.logsumexp(jnp.minimum(log_target, log_draft), axis=-1)


def step_means(objective: Objective, loss: Array, accepted: Array | None, counted: Array) -> Array:
    """The objective [n] of every step from sums [n] over its counted positions; 0 where nothing is counted."""
    least = jnp.maximum(counted, 1)
    if objective.kind != "lk_lambda" or accepted is None:
        return loss / least
    weight = jax.lax.stop_gradient(objective.kl_scale * jnp.exp(-objective.kl_decay * accepted / least))
    return (weight * loss + (1 - weight) * (counted - accepted)) / least
