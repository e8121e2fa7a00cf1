"""The fused delta-rule step of GPUs, interpreted, against the reference. What it is worth on one: benchmarks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta import gpu, reference, step
from tests.helpers import assert_close
from tests.kernels.test_gated_delta_tpu import arguments


@pytest.mark.parametrize(
    ("batch", "window", "before", "key_heads", "repeats"),
    [(4, 3, 2, 1, 3), (2, 1, 1, 4, 1), (2, 5, 8, 2, 2), (1, 8, 4, 1, 1)],
)
def test_as_the_reference(batch: int, window: int, before: int, key_heads: int, repeats: int) -> None:
    """Every accepted count, windows that change their width, grouped heads."""
    args = arguments(batch, window, before, key_heads, repeats)
    got, want = jax.jit(gpu.interpreted)(*args), jax.jit(reference.step)(*args)
    for name, a, b in zip(("out", "updates", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)
    assert jnp.array_equal(got[2][0], args[0][0]), "nothing was accepted in row 0"


def test_strong_decays_and_rejected_garbage() -> None:
    state, pending, *window = arguments(2, 4, 3, 1, 2, strength=60.0)
    want = reference.step(state, pending, *window)
    rejected = jnp.arange(3)[None, :] >= pending.accepted[:, None]
    bad = pending._replace(updates=jnp.where(rejected[..., None, None], jnp.nan, pending.updates))
    for name, a, b in zip(("out", "updates", "state"), gpu.interpreted(state, bad, *window), want, strict=True):
        assert_close(a, b, 1e-5, name)


def test_what_it_cannot_do() -> None:
    state, pending, *window = arguments(1, 2, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        step(state, pending, *window, implementation="gpu")
    with pytest.raises(NotImplementedError, match="not float32"):
        gpu.interpreted(state.astype(jnp.bfloat16), pending, *window)
    with pytest.raises(NotImplementedError, match="powers of two"):
        gpu.interpreted(state[..., :96], pending, *window)
