"""The fused delta-rule step of GPUs, interpreted, against the reference. What it is worth on one: benchmarks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import proof
from pallas_kernels.gated_delta import Pending, reference, step, triton
from tests.helpers import assert_close
from tests.kernels.test_gated_delta_tpu import arguments


@pytest.mark.parametrize(
    ("batch", "window", "before", "key_heads", "repeats"),
    [(4, 3, 2, 1, 3), (2, 1, 1, 4, 1), (2, 5, 8, 2, 2), (1, 8, 4, 1, 1)],
)
@pytest.mark.parametrize("tiles", [triton.HOLD, triton.Tiles(64, 1, 4)])
def test_as_the_reference(
    batch: int, window: int, before: int, key_heads: int, repeats: int, tiles: triton.Tiles
) -> None:
    """Every accepted count, windows that change their width, grouped heads; holding all rows, and walking down them."""
    args = arguments(batch, window, before, key_heads, repeats)
    got, want = triton.interpreted(*args, tiles=tiles), jax.jit(reference.step)(*args)
    for name, a, b in zip(("out", "updates", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)
    assert jnp.array_equal(got[2][0], args[0][0]), "nothing was accepted in row 0"


@pytest.mark.parametrize("tiles", [triton.HOLD, triton.Tiles(128, 1, 2)])
def test_strong_decays_and_rejected_garbage(tiles: triton.Tiles) -> None:
    state, pending, *window = arguments(2, 4, 3, 1, 2, strength=60.0)
    want = reference.step(state, pending, *window)
    rejected = jnp.arange(3)[None, :] >= pending.accepted[:, None]
    bad = [jnp.where(rejected[..., None, None], jnp.nan, x) for x in (pending.keys, pending.updates)]
    got = triton.interpreted(state, pending._replace(keys=bad[0], updates=bad[1]), *window, tiles=tiles)
    for name, a, b in zip(("out", "updates", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)


def test_what_it_cannot_do() -> None:
    state, pending, *window = arguments(1, 2, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        step(state, pending, *window, implementation="triton")
    with pytest.raises(NotImplementedError, match="not float32"):
        triton.interpreted(state.astype(jnp.bfloat16), pending, *window)
    with pytest.raises(NotImplementedError, match="powers of two"):
        triton.interpreted(state[..., :96], pending, *window)


@pytest.mark.parametrize(("slots", "tiles"), [(8, triton.HOLD), (32, triton.WALK)])
def test_what_is_used_has_been_proven(slots: int, tiles: triton.Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many heads are walked down. Windows of 9, which are too long for Mosaic's kernel."""
    proven: list[Any] = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(triton, "step", lambda *_, tiles: (tiles,) * 3)
    monkeypatch.setattr(proof, "require", lambda _, kernel, *__, rtol: proven.append(kernel.keywords["tiles"]))
    heads = jnp.zeros((slots, 9, 32, 1))
    state = jax.ShapeDtypeStruct((slots, 32, 128, 128), jnp.float32)
    pending = Pending(heads, heads, heads[..., 0], jnp.zeros(slots, jnp.int32))
    used = step(state, pending, heads, heads, heads, heads[..., 0], heads[..., 0])  # type: ignore[arg-type]
    assert used[0] == proven[0] == tiles  # type: ignore[comparison-overlap]


def test_threads_that_would_share_columns() -> None:
    state, pending, *window = arguments(1, 2, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="4 warps do not walk down 64 columns alone"):
        triton.interpreted(state[..., :64], pending, *window, tiles=triton.Tiles(64, 4, 4))
    assert triton.tiles_for(jnp.zeros((64, 16, 2, 16))) == triton.HOLD
