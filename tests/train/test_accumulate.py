"""A batch in parts gives what the batch gives: loss, sums and gradients, by the means of the whole."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.sharding import make_mesh
from eagle3_jax.target import Target
from tests.helpers import assert_close, relative_error
from tests.train.models import make_drafter, make_target, random_tokens, sharpened
from train.objective import KL, Objective
from train.step import Inputs, TrainState, batch_gradient, make_model, make_step

ROWS, LENGTH = 8, 12
# Row by row from no supervised token to all of them, so that means of means are other means.
MASK = jnp.asarray(np.arange(LENGTH)[None] >= np.array([12, 9, 8, 6, 5, 3, 2, 1])[:, None])


def batch(*, packed: bool = False) -> Inputs:
    ids = jnp.asarray(np.tile(np.repeat([1, 2], LENGTH // 2), (ROWS, 1)), jnp.int32)
    return Inputs(random_tokens(0, ROWS, LENGTH), MASK, ids if packed else None)


@cache
def models() -> tuple[Target, Eagle3]:
    return sharpened(make_target()), make_drafter()


def pair(objective: Objective = KL, mesh: Any = None) -> Any:
    return make_model(*models(), num_steps=2, objective=objective, mesh=mesh)


@pytest.mark.parametrize(
    ("objective", "packed", "parts"),
    [
        (KL, True, 8),
        (Objective("lk_alpha", hidden_weight=0.5), False, 4),
        (Objective("lk_lambda", kl_decay=3.0), True, 4),
    ],
    ids=["kl", "alpha-hidden", "lambda"],
)
def test_parts_equal_the_whole(objective: Objective, packed: bool, parts: int) -> None:
    model, params, frozen = pair(objective)
    inputs = batch(packed=packed)
    compute = jax.jit(lambda n: batch_gradient(model, params, frozen, inputs, n), static_argnums=0)
    (loss, sums, grads), (want_loss, want_sums, want) = compute(parts), compute(1)
    assert_close(loss, want_loss)
    jax.tree.map(assert_close, sums, want_sums)
    for name in want:  # sums in another order, through three norms
        assert_close(grads[name], want[name], rtol=5e-5, name=name)


def test_means_of_means_would_be_another_gradient() -> None:
    """So the test above can tell: the parts' own losses, averaged, are not the batch's."""
    model, params, frozen = pair()
    inputs = batch()
    halves = [jax.tree.map(lambda x, i=i: x[i::2], inputs) for i in range(2)]
    loss = jax.jit(lambda x: model.loss(params, frozen, x)[0])
    mean = np.mean([float(loss(half)) for half in halves])
    assert relative_error(mean, loss(inputs)) > 1e-3


def test_stored_features_in_parts() -> None:
    model, params, frozen = pair()
    inputs = batch()
    stored = dataclasses.replace(inputs, features=jax.jit(model.see)(frozen, inputs))
    (loss, _, grads), (want_loss, _, want) = (
        jax.jit(lambda x, n=n: batch_gradient(model, params, frozen, x, n))(x) for x, n in ((stored, 4), (inputs, 1))
    )
    assert_close(loss, want_loss)
    jax.tree.map(lambda got, whole: assert_close(got, whole, rtol=5e-5), grads, want)


def test_parts_on_a_mesh_take_rows_from_every_device() -> None:
    """A step in two parts on two devices is the step of one device, and no row moves between them."""
    after = []
    for mesh, parts in ((None, 1), (make_mesh(data=2), 2)):
        model, params, frozen = pair(mesh=mesh)
        optimizer = optax.sgd(0.1)
        inputs = batch()
        if mesh is not None:
            spread = jax.NamedSharding(mesh, jax.P("data"))
            inputs = jax.tree.map(lambda x, spread=spread: jax.device_put(x, spread), inputs)
        state = TrainState(params, optimizer.init(params))
        step: Any = make_step(model, optimizer, parts=parts, state=state)
        compiled = step.lower(state, frozen, inputs).compile().as_text()
        assert "all-to-all" not in compiled and "collective-permute" not in compiled
        state, metrics = step(state, frozen, inputs)
        after.append((jax.device_get(state.params), metrics.loss))
        step(state, frozen, inputs)
        assert step._cache_size() == 1, "the second step is the first one's program"
    jax.tree.map(lambda got, whole: assert_close(got, whole, rtol=5e-5), *after[::-1])
