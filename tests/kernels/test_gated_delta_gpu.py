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
@pytest.mark.parametrize("tiles", [gpu.HOLD, gpu.Tiles(64, 1, 4)])
def test_as_the_reference(batch: int, window: int, before: int, key_heads: int, repeats: int, tiles: gpu.Tiles) -> None:
    """Every accepted count, windows that change their width, grouped heads; holding all rows, and walking down them."""
    args = arguments(batch, window, before, key_heads, repeats)
    got, want = gpu.interpreted(*args, tiles=tiles), jax.jit(reference.step)(*args)
    for name, a, b in zip(("out", "updates", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)
    assert jnp.array_equal(got[2][0], args[0][0]), "nothing was accepted in row 0"


@pytest.mark.parametrize("tiles", [gpu.HOLD, gpu.Tiles(128, 1, 2)])
def test_strong_decays_and_rejected_garbage(tiles: gpu.Tiles) -> None:
    state, pending, *window = arguments(2, 4, 3, 1, 2, strength=60.0)
    want = reference.step(state, pending, *window)
    rejected = jnp.arange(3)[None, :] >= pending.accepted[:, None]
    bad = [jnp.where(rejected[..., None, None], jnp.nan, x) for x in (pending.keys, pending.updates)]
    got = gpu.interpreted(state, pending._replace(keys=bad[0], updates=bad[1]), *window, tiles=tiles)
    for name, a, b in zip(("out", "updates", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)


def test_what_it_cannot_do() -> None:
    state, pending, *window = arguments(1, 2, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        step(state, pending, *window, implementation="gpu")
    with pytest.raises(NotImplementedError, match="not float32"):
        gpu.interpreted(state.astype(jnp.bfloat16), pending, *window)
    with pytest.raises(NotImplementedError, match="powers of two"):
        gpu.interpreted(state[..., :96], pending, *window)


def test_many_heads_are_walked_down() -> None:
    few, many = (jax.ShapeDtypeStruct((batch, 32, 128, 128), jnp.float32) for batch in (8, 32))
    assert gpu.tiles_for(few) == gpu.HOLD and gpu.tiles_for(many) == gpu.WALK
