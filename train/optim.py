"""AdamW with linear warm-up, cosine decay and global-norm clipping."""

from __future__ import annotations

import jax
import optax

from train.params import Params
from train.recipe import OptimizerRecipe


def learning_rate(recipe: OptimizerRecipe, num_steps: int) -> optax.Schedule:
    """Step (from 0) to rate. The first step already moves: a warm-up from zero would waste it."""
    warmup = max(1, round(recipe.warmup_ratio * num_steps))
    peak, last = recipe.learning_rate, recipe.learning_rate * recipe.final_ratio
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    fall = optax.cosine_decay_schedule(peak, max(num_steps - warmup, 1), last / peak)
    return optax.join_schedules([rise, fall], [warmup])


def make_optimizer(recipe: OptimizerRecipe, num_steps: int) -> optax.GradientTransformation:
    """Weight decay, if any, is for matrices alone."""
    adamw = optax.adamw(
        learning_rate(recipe, num_steps), b1=recipe.b1, b2=recipe.b2, weight_decay=recipe.weight_decay, mask=_matrices
    )
    return optax.chain(optax.clip_by_global_norm(recipe.clip_norm), adamw)


def _matrices(params: Params) -> dict[str, bool]:
    return jax.tree.map(lambda x: x.ndim > 1, params)
