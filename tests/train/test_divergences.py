"""Written-out gradients against automatic differentiation of the definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tests.helpers import assert_close
from train.divergences import kl_divergence, log_acceptance


def kl_defined(teacher: Array, logits: Array) -> Array:
    log_p, log_q = jax.nn.log_softmax(teacher)[None], jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def acceptance_defined(log_target: Array, logits: Array) -> Array:
    return jnp.log(jnp.sum(jnp.minimum(jnp.exp(log_target)[None], jax.nn.softmax(logits)), axis=-1))


@pytest.mark.parametrize(("ours", "defined"), [(kl_divergence, kl_defined), (log_acceptance, acceptance_defined)])
@pytest.mark.parametrize("scale", [0.1, 3.0, 12.0])
def test_value_and_gradient(ours, defined, scale: float) -> None:  # noqa: ANN001
    teacher, logits, cotangent = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(4, 5, 33), (3, 4, 5, 33), (3, 4, 5)])
    )
    teacher, logits = jax.nn.log_softmax(teacher * scale) - 0.3, logits * scale
    value, pull = jax.vjp(lambda x: ours(teacher, x), logits)
    want, pull_defined = jax.vjp(lambda x: defined(teacher, x), logits)
    assert_close(value, want)
    assert_close(pull(cotangent)[0], pull_defined(cotangent)[0])


def test_equal_and_disjoint_distributions() -> None:
    teacher = jax.random.normal(jax.random.key(4), (7,))
    np.testing.assert_allclose(kl_divergence(teacher, teacher[None] + 5.0), 0.0, atol=1e-5)
    np.testing.assert_allclose(log_acceptance(jax.nn.log_softmax(teacher), teacher[None]), 0.0, atol=1e-6)
    far = jnp.asarray([0.0, -200.0]), jnp.asarray([[-200.0, 0.0]])
    value, pull = jax.vjp(lambda x: log_acceptance(far[0], x), far[1])
    assert_close(value[0], -200 + np.log(2))  # beyond float32 in plain numbers
    assert np.isfinite(pull(jnp.ones(1))[0]).all()
