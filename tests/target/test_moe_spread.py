"""Experts over devices: the same sums and gradients as on one, whatever the router prefers, and little passed on."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.config import TargetConfig
from eagle3_jax.layers import moe
from eagle3_jax.layers.moe import MoE
from eagle3_jax.meshes import MeshShape, parse_mesh
from eagle3_jax.planning.collectives import collectives, moved
from eagle3_jax.quantization import E4M3, quantize_model
from eagle3_jax.sharding import laid_out, model_shardings, pin_rows
from tests.helpers import assert_close
from tests.target import oracle

CONFIG = TargetConfig.from_hf({**oracle.QWEN3_MOE, "num_experts": 8})
X = np.random.default_rng(0).standard_normal((4, 7, CONFIG.hidden_size)).astype(np.float32)
X[..., 0] = 1.0
PREFERENCES = {"balanced": 0.0, "unbalanced": 3.0, "two experts take all": 100.0}
BATCH = ["ep4 tp2", "dp2 ep4", "fsdp2 ep2 tp2", "fsdp4", "dp2 fsdp2 tp2", "tp8"]


@functools.cache
def layer(preference: float) -> tuple[Any, Any]:
    """A layer whose router prefers the last two experts, which one device holds, by that much."""
    model = MoE(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    # Every token has a component along this direction, to which only the last two experts answer.
    direction = jnp.zeros((CONFIG.hidden_size, CONFIG.num_experts)).at[0, -2:].set(preference)
    model.gate.kernel[...] = model.gate.kernel[...] + direction
    return nnx.split(model)


@functools.cache
def whole() -> Any:
    graph = layer(0.0)[0]
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x))


@functools.cache
def on_mesh(name: str, rows: str = "batch") -> tuple[Any, str]:
    """The layer on a mesh, compiled, and the program's text."""
    mesh, (graph, state) = parse_mesh(name).mesh(), layer(0.0)

    def run(state: Any, x: jax.Array) -> jax.Array:
        with laid_out(mesh, rows):
            return pin_rows(nnx.merge(graph, state)(pin_rows(x)))

    spread = jax.device_put(state, model_shardings(state, mesh, CONFIG))
    compiled = jax.jit(run).lower(spread, jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
    call = lambda state: compiled(jax.device_put(state, model_shardings(state, mesh, CONFIG)), X)
    return call, compiled.as_text()


@pytest.mark.parametrize("name", BATCH)
def test_no_token_is_dropped(name: str) -> None:
    for preference, size in PREFERENCES.items():
        graph, state = layer(size)
        assert_close(on_mesh(name)[0](state), whole()(state, X), 1e-6, preference)
        model = nnx.merge(graph, state)
        chosen = np.asarray(model._route(X.reshape(-1, X.shape[-1]), model.gate.kernel[...])[1])
        assert (chosen >= CONFIG.num_experts - 2).all() == (preference == "two experts take all")


@pytest.mark.parametrize("name", [None, "dp2 ep4", "fsdp2 ep2 tp2"])
def test_many_tokens_go_through_in_parts(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 by threes, and 14 of a device: the last part is filled up."""
    want, (graph, state) = whole()(layer(3.0)[1], X), layer(3.0)
    monkeypatch.setattr(moe, "AT_ONCE", 3)
    if name is None:
        got = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, X)
    else:
        got = on_mesh.__wrapped__(name)[0](state)
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("name", BATCH)
def test_one_sum_of_the_rows_ends_the_layer(name: str) -> None:
    """By bytes: one float32 [rows, D], and matrices that `fsdp` cuts where rows need them whole. So no row for each
    expert of a token crosses the links, and no expert leaves its devices."""
    shape, (_, text) = parse_mesh(name), on_mesh(name)
    share = shape.expert * shape.tensor
    ends = 2 * (share - 1) / share * X.nbytes / shape.rows
    assert moved(collectives(text)) == pytest.approx(ends + gathered(shape))


def gathered(shape: MeshShape) -> float:
    mesh, (_, state) = shape.mesh(), layer(0.0)
    places = jax.tree.leaves(model_shardings(state, mesh, CONFIG))
    held = [place.shard_shape(x.shape) for x, place in zip(jax.tree.leaves(state), places, strict=True)]
    cut = [part for part, place in zip(held, places, strict=True) if "fsdp" in place.spec]
    return sum((shape.fsdp - 1) * 4 * float(np.prod(part)) for part in cut)


def test_slots_meet_the_matrices_as_they_are_held() -> None:
    """Generation gathers no matrix: its rows are few, and inner products are summed instead."""
    call, text = on_mesh("fsdp2 ep2 tp2", "slots")
    state = layer(3.0)[1]
    assert_close(call(state), whole()(state, X), 1e-6)
    assert "all-gather" not in {c.kind for c in collectives(text) if c.bytes > X.nbytes}


@pytest.mark.parametrize("name", ["dp2 fsdp2 tp2", "tp8"])
def test_gradients(name: str) -> None:
    mesh, (graph, state) = parse_mesh(name).mesh(), layer(3.0)

    def grads(state: Any, x: jax.Array, on: Any) -> Any:
        def loss(state: Any, x: jax.Array) -> jax.Array:
            with laid_out(on, "batch"):
                return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

        return jax.grad(loss, (0, 1))(state, x)

    spread = jax.device_put(state, model_shardings(state, mesh, CONFIG))
    run = jax.jit(grads, static_argnums=2)
    got, want = (jax.tree.leaves(found) for found in (run(spread, X, mesh), run(state, X, None)))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("block", [None, 8, 5])
def test_blocks_that_devices_share(block: int | None) -> None:
    """Three features a device of 24, scales for all, 8 or 5 of them: each device multiplies by its own."""
    mesh, (graph, state) = parse_mesh("tp8").mesh(), layer(0.0)
    how = type(E4M3)(E4M3.dtype, E4M3.largest, block)
    paths = [f"experts.{name}_proj" for name in ("gate", "up", "down")]
    graph, state = nnx.split(quantize_model(nnx.merge(graph, state), how, paths))

    def run(state: Any, on: Any) -> jax.Array:
        with laid_out(on, "slots"):
            return nnx.merge(graph, state)(jnp.asarray(X))

    spread = jax.device_put(state, model_shardings(state, mesh, CONFIG))
    compiled = jax.jit(run, static_argnums=1)
    assert_close(compiled(spread, mesh), compiled(state, None), 1e-6)
