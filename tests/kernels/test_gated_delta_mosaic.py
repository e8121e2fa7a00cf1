"""The delta-rule step by Mosaic GPU: interpreted with its copies and barriers, and lowered, which needs no GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import use_abstract_mesh

from pallas_kernels import dispatch, proof
from pallas_kernels.gated_delta import Pending, mosaic, reference, step, triton
from tests.helpers import assert_close
from tests.kernels.test_gated_delta_tpu import arguments
from tests.kernels.test_lowered_for_cuda import HEADS, HOPPER, KEY_HEADS, WIDTH, of

OLD = jax.__version_info__ < (0, 11)
NAMES = ("out", "updates", "state")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel, interpreted. Version 0.10 interprets plain loads alone, and layouts mean nothing there."""
    if OLD:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        monkeypatch.setattr(mosaic, "_load", lambda ref, _: ref[...])
        monkeypatch.setattr(plgpu, "layout_cast", lambda x, _: x)
    else:
        InterpretGPUParams = plgpu.InterpretGPUParams
    return partial(mosaic.step, interpret=InterpretGPUParams(detect_races=True))


@pytest.mark.parametrize(
    ("batch", "window", "before", "key_heads", "repeats", "tiles"),
    [
        (2, 1, 1, 2, 1, mosaic.Tiles(128, 2)),
        (3, 4, 2, 1, 2, mosaic.WHOLE),
        (1, 2, 4, 1, 1, mosaic.QUARTER),
        (2, 8, 8, 1, 1, mosaic.Tiles(64, 4)),
    ],
)
def test_as_the_reference(
    batch: int, window: int, before: int, key_heads: int, repeats: int, tiles: mosaic.Tiles, interpreted: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Every accepted count, windows that change their width, grouped heads, whole heads and parts of them."""
    args = arguments(batch, window, before, key_heads, repeats)
    got, want = interpreted(*args, tiles=tiles), jax.jit(reference.step)(*args)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, 1e-5, name)
    assert jnp.array_equal(got[2][0], args[0][0]), "nothing was accepted in row 0"
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_strong_decays_and_rejected_garbage(interpreted: Any) -> None:
    state, pending, *window = arguments(2, 2, 3, 1, 1, strength=60.0)
    want = reference.step(state, pending, *window)
    rejected = jnp.arange(3)[None, :] >= pending.accepted[:, None]
    bad = [jnp.where(rejected[..., None, None], jnp.nan, x) for x in (pending.keys, pending.updates)]
    got = interpreted(state, pending._replace(keys=bad[0], updates=bad[1]), *window)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, 1e-5, name)


@pytest.mark.parametrize(
    ("slots", "window", "tiles"), [(1, 1, mosaic.QUARTER), (8, 4, mosaic.HALF), (64, 8, mosaic.WHOLE)]
)
def test_lowered_at_the_shapes_of_a_9b_target(
    slots: int, window: int, tiles: mosaic.Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the state and the updates in place."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    keys, values, gates = of(window, KEY_HEADS, WIDTH), of(window, HEADS, WIDTH), of(window, HEADS)
    pending = Pending(keys, values, gates, of(dtype=jnp.int32))
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype),
        (of(HEADS, WIDTH, WIDTH), pending, keys, keys, values, gates, gates),
    )
    assert mosaic.tiles_for(args[0]) == tiles
    with use_abstract_mesh(HOPPER):
        lowered = jax.jit(mosaic.step).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "mosaic_gpu" in text
    assert text.count("#stablehlo.output_operand_alias") == 2


def test_what_it_cannot_do(interpreted: Any) -> None:
    state, pending, *window = arguments(1, 2, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        step(state, pending, *window, implementation="mosaic")
    step(state, pending, *window)
    assert "for GPUs" in dispatch.fallbacks()["gated_delta.step by Mosaic"]
    with pytest.raises(NotImplementedError, match="not float32"):
        interpreted(state.astype(jnp.bfloat16), pending, *window)
    with pytest.raises(NotImplementedError, match="a multiple of 128"):
        interpreted(state[..., :96], pending, *window, tiles=mosaic.WHOLE)
    with pytest.raises(NotImplementedError, match="a window of 9 tokens; at most 8"):
        interpreted(*arguments(1, 9, 1, 1, 1))


def test_what_is_used_has_been_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[Any] = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "step", lambda *_, tiles: (tiles,) * 3)
    monkeypatch.setattr(proof, "require", lambda _, kernel, *__, rtol: proven.append(kernel.keywords["tiles"]))
    used = step(*triton.small_case(), implementation="gpu")
    assert used[0] == proven[0] == mosaic.QUARTER  # type: ignore[comparison-overlap]
