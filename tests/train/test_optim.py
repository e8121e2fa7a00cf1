"""The learning rate's course, and who is decayed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.optim import learning_rate, make_optimizer
from train.recipe import OptimizerRecipe


def test_warm_up_from_the_first_step_then_cosine() -> None:
    rate = learning_rate(OptimizerRecipe(learning_rate=1.0, warmup_ratio=0.1, final_ratio=0.1), 100)
    rates = [float(rate(i)) for i in range(100)]
    assert np.allclose(rates[:10], np.arange(1, 11) / 10)
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.55, abs=0.01)
    assert 0.1 <= rates[99] < 0.11 and rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_very_short_runs_have_a_rate(num_steps: int) -> None:
    rate = learning_rate(OptimizerRecipe(learning_rate=1.0), num_steps)
    assert all(0 < float(rate(i)) <= 1 for i in range(num_steps))


def test_gradients_are_clipped_and_only_matrices_decay() -> None:
    optimizer = make_optimizer(OptimizerRecipe(learning_rate=1e-2, weight_decay=1.0, warmup_ratio=0.0), 10)
    params = {"kernel": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert (updates["kernel"] < 0).all() and not updates["norm"].any()
