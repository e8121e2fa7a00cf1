"""What is minimised at each step: a divergence of the drafter from the target, or the acceptance it stands for.

p is the target's distribution, q the drafter's, over the draft vocabulary. The divergence takes p renormalised to that
vocabulary, acceptance takes p as it is: tokens that cannot be drafted are never accepted. So do SpecForge's LK losses,
whose definitions and defaults these are (specforge/core/lk_loss.py).

    kl          KL(p || q)
    lk_alpha    -log a,  a = sum min(p, q): the chance that a token drafted from q is accepted
    lk_lambda   w KL + (1 - w) (1 - a),  w = kl_scale exp(-kl_decay a), held constant: KL first, acceptance as it grows

In lk_lambda KL and a are a step's means over its counted positions; the others are means of what they are at each.

`hidden_weight` adds EAGLE-1's regression. There the drafter's output was the next position's feature, compared with the
target's by smooth L1 (its mean over the width). In EAGLE-3 the output stands for two things at once: fed back, for the
fused features, which are trained themselves and so no fixed aim; and, after the final norm, for the target's last
hidden state after its own, the one that enters an output projection with the same rows. The regression is to that one,
at every step and supervised position. It needs no state that is not there anyway, offline too.
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
    hidden_weight: float = 0.0

    @property
    def needs_acceptance(self) -> bool:
        return self.kind != "kl"


KL = Objective()


def smooth_l1(found: Array, wanted: Array) -> Array:
    """Mean over the width [...] of d**2 / 2 where |d| < 1 and |d| - 1/2 elsewhere, d = found - wanted, in float32."""
    far = jnp.abs(found.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(far < 1, far**2 / 2, far - 0.5), axis=-1)


def step_means(objective: Objective, loss: Array, accepted: Array | None, counted: Array) -> Array:
    """The objective [n] of every step from sums [n] over its counted positions; 0 where nothing is counted."""
    least = jnp.maximum(counted, 1)
    if objective.kind != "lk_lambda" or accepted is None:
        return loss / least
    weight = jax.lax.stop_gradient(objective.kl_scale * jnp.exp(-objective.kl_decay * accepted / least))
    return (weight * loss + (1 - weight) * (counted - accepted)) / least
