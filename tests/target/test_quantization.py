"""Weights in one byte: how they are rounded, how they are multiplied, which they are, and where they lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from eagle3_jax.config import TargetConfig
from eagle3_jax.errors import ConfigError
from eagle3_jax.planning.chips import parse_topology, tpu_devices
from eagle3_jax.quantization import (
    E4M3,
    MATRICES,
    QUANTIZATIONS,
    SCALE,
    Quantization,
    find_quantization,
    matmul,
    quantize,
    quantize_model,
    ragged_dot,
)
from eagle3_jax.sharding import laid_out, make_mesh, param_sharding
from eagle3_jax.target import Target
from tests.helpers import assert_close, relative_error
from tests.target import oracle

IN, OUT = 48, 40
WAYS = {
    "int8": QUANTIZATIONS["int8"],
    "fp8": E4M3,
    "whole blocks": dataclasses.replace(E4M3, block=16),
    "a last block of 8": dataclasses.replace(E4M3, block=20),
    "int8 blocks": dataclasses.replace(QUANTIZATIONS["int8"], block=16),
}


@pytest.fixture(params=WAYS)
def how(request: pytest.FixtureRequest) -> Quantization:
    return WAYS[request.param]


def weights(*shape: int) -> jax.Array:
    """Columns of very different sizes, one of them zero."""
    w = np.random.default_rng(0).normal(size=shape) * np.logspace(-3, 2, shape[-1])
    w[..., 3] = 0
    return jnp.asarray(w, jnp.float32)


def blocks(array: np.ndarray, block: int) -> list[np.ndarray]:
    return [array[..., i : i + block, :] for i in range(0, array.shape[-2], block)]


def test_rounded_to_the_nearest_by_the_largest_of_each_block(how: Quantization) -> None:
    w = weights(IN, OUT)
    found = quantize(w, how)
    parts = blocks(np.asarray(w), how.block or IN)
    assert found.values.dtype == how.dtype and found.scale.shape == (len(parts), OUT)
    for i, part in enumerate(parts):
        most = np.abs(part).max(axis=0)
        assert_close(found.scale[i], np.where(most > 0, most / np.float32(how.largest), 1), 1e-6)
        exact = part / np.asarray(found.scale[i])
        stored = blocks(np.asarray(found.values), how.block or IN)[i]
        if how.dtype == jnp.int8:
            assert np.abs(stored - exact).max() <= 0.5 + 1e-4
        else:
            theirs = torch.tensor(exact).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
            assert np.mean(stored.astype(np.float32) != theirs) < 0.01  # quotients that another division rounds apart
            assert_close(stored.astype(np.float32), theirs, 1e-3)
    assert not np.asarray(found.dequantize(jnp.float32))[:, 3].any()
    assert relative_error(found.dequantize(jnp.float32), w) < (0.008 if how.dtype == jnp.int8 else 0.04)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_product_is_that_of_the_dequantised_matrix(how: Quantization, dtype: Any) -> None:
    x = jax.random.normal(jax.random.key(1), (3, 5, IN)).astype(dtype)
    w = quantize(weights(IN, OUT), how)
    want = np.asarray(x, np.float64) @ np.asarray(w.dequantize(jnp.float32), np.float64)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(matmul)(x, w)
    assert got.dtype == dtype and got.shape == (3, 5, OUT)
    assert_close(got, want, 1e-6 if dtype == jnp.float32 else 5e-3)


def test_on_a_gpu_weights_are_widened_in_every_step(how: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """There XLA would do it once, before the loop, and read twice the bytes from then on."""
    w = quantize(weights(IN, IN) * 0.01, how)
    x = jax.random.normal(jax.random.key(1), (2, IN))

    def steps(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: matmul(x, w), x)

    with jax.default_matmul_precision("highest"):
        want = jax.jit(steps)(x)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        lowered = jax.jit(lambda x: steps(x)).lower(x)
        assert lowered.as_text().count("optimization_barrier") == 1
        assert_close(lowered.compile()(x), want, 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_experts(how: Quantization, dtype: Any) -> None:
    x, w = jax.random.normal(jax.random.key(1), (10, IN)).astype(dtype), weights(4, IN, OUT)
    sizes = jnp.asarray([3, 0, 4, 2])  # and a last row of no group
    found = quantize(w, how)
    with jax.default_matmul_precision("highest"):
        want = jax.lax.ragged_dot(x.astype(jnp.float32), found.dequantize(jnp.float32), sizes)
        got = jax.jit(ragged_dot)(x, found, sizes)
    assert got.dtype == dtype
    assert_close(got[:9], want[:9], 1e-5 if dtype == jnp.float32 else 5e-3)


def written_out(program: Callable[..., Any], *arguments: Any) -> int:
    """Bytes that a program needs beside its arguments and results, as compiled for a TPU v5p."""
    (device, *_) = tpu_devices(parse_topology("v5p:2x2x1"))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    return jax.jit(program).lower(*jax.tree.map(place, arguments)).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_tpu_reads_the_bytes_as_they_are(name: str) -> None:
    """No matrix in bfloat16 is ever in memory: not before a loop of steps, not in it."""
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    stored = [jax.eval_shape(lambda w: quantize(w, QUANTIZATIONS[name]), shape)] * 4

    def steps(x: jax.Array, ws: Any) -> jax.Array:
        return jax.lax.fori_loop(0, 16, lambda _, x: functools.reduce(lambda x, w: jnp.tanh(matmul(x, w)), ws, x), x)

    assert written_out(steps, jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16), stored) < 2**20


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_tpu_reads_experts_in_int8_as_they_are(dtype: Any) -> None:
    """In bfloat16; in float32 it must compile."""
    stored = jax.eval_shape(
        lambda w: quantize(w, QUANTIZATIONS["int8"]), jax.ShapeDtypeStruct((16, 512, 512), jnp.bfloat16)
    )
    x, sizes = jax.ShapeDtypeStruct((32, 512), dtype), jax.ShapeDtypeStruct((16,), jnp.int32)
    found = written_out(ragged_dot, x, stored, sizes)
    assert dtype == jnp.float32 or found < 2**20


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_a_tpu_reads_narrow_experts_as_they_are(dtype: Any) -> None:
    """64 outputs where a tile has 128 columns, as on a device that has an eighth of 512 features: no padded copies."""
    stored = jax.ShapeDtypeStruct((16, 512, 64), jnp.bfloat16)
    if dtype == jnp.int8:
        stored = jax.eval_shape(lambda w: quantize(w, QUANTIZATIONS["int8"]), stored)
    x, sizes = jax.ShapeDtypeStruct((32, 512), jnp.bfloat16), jax.ShapeDtypeStruct((16,), jnp.int32)
    with jax.default_matmul_precision("default"):
        assert written_out(ragged_dot, x, stored, sizes) < 2**19


LEFT = {
    "embed_tokens.weight", "lm_head.kernel", "norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    "q_norm.weight", "k_norm.weight", "conv1d.weight", "A_log", "dt_bias", "in_proj_a.kernel", "in_proj_b.kernel",
    "mlp.gate.kernel", "shared_expert_gate.kernel", "q_proj.bias", "k_proj.bias", "v_proj.bias",
}  # fmt: skip


@pytest.mark.parametrize("family", [oracle.QWEN3_5, oracle.QWEN3_5_MOE, oracle.QWEN3_NEXT, oracle.LLAMA, oracle.QWEN2])
def test_every_matrix_of_the_layers_is_quantised_and_nothing_else(family: dict[str, Any]) -> None:
    config = TargetConfig.from_hf(family)
    make = lambda: quantize_model(Target(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), E4M3)
    found = {".".join(map(str, p)): x for p, x in nnx.to_flat_state(nnx.state(nnx.eval_shape(make), nnx.Param))}
    small = {name for name, x in found.items() if x.dtype == jnp.float8_e4m3fn}
    assert small == {name for name in found if MATRICES.fullmatch(name)} and len(small) > 4 * config.num_layers
    assert {name for name in found if name.endswith(SCALE)} == {name + SCALE for name in small}
    assert all(x.dtype == jnp.float32 for name, x in found.items() if name.endswith(SCALE))
    others = [name for name in found if name not in small and not name.endswith(SCALE)]
    assert [name for name in others if not name.endswith(tuple(LEFT))] == []


def test_scales_lie_as_their_matrices_do() -> None:
    config = TargetConfig.from_hf(oracle.QWEN3_5_MOE)  # four heads, two of keys and values
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)

    def place(path: str, *shape: int) -> P:
        return param_sharding(path.split("."), shape, mesh, config).spec

    layer = "layers.3.self_attn"
    assert place(f"{layer}.q_proj.kernel_scale", 4, 256) == P("fsdp", "tensor")
    assert place(f"{layer}.q_proj.kernel_scale", 1, 256) == P(None, "tensor")
    assert place(f"{layer}.o_proj.kernel_scale", 4, 40) == P("tensor", "fsdp")
    assert place(f"{layer}.o_proj.kernel_scale", 1, 40) == P(None, "fsdp")
    assert place(f"{layer}.o_proj.kernel_scale", 3, 40) == P(None, "fsdp")
    assert place("layers.0.mlp.experts.gate_proj_scale", 6, 1, 24) == P("expert", None, "tensor")
    assert place("layers.0.mlp.experts.down_proj_scale", 6, 2, 40) == P("expert", "tensor", "fsdp")
    assert place("layers.0.mlp.shared_expert.down_proj.kernel_scale", 1, 40) == P(None, "fsdp")


@pytest.mark.parametrize("block", [0, 8])
def test_on_a_mesh(block: int) -> None:
    config = TargetConfig.from_hf({**oracle.QWEN3_5_MOE, "num_hidden_layers": 2, "layer_types": None})
    how = dataclasses.replace(E4M3, block=block or None)
    model = quantize_model(Target(config, rngs=nnx.Rngs(0)), how)
    graph, state = nnx.split(model)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    ids = np.arange(16, dtype=np.int32).reshape(2, 8)

    def run(state: Any) -> jax.Array:
        target = nnx.merge(graph, state)
        return target.logits(target(jnp.asarray(ids)).hidden)

    places = lambda path, x: param_sharding([str(getattr(k, "key", k)) for k in path[:-1]], x.shape, mesh, config)
    spread = jax.device_put(state, jax.tree_util.tree_map_with_path(places, state))
    cut = [x for x in jax.tree.leaves(spread) if x.dtype != jnp.float32 and not x.sharding.is_fully_replicated]
    assert len(cut) > 8
    with jax.default_matmul_precision("highest"):
        want = jax.jit(run)(state)
        with laid_out(mesh, "slots"):
            got = jax.jit(lambda state: run(state))(spread)
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("name", ["awq", "int4", None, 8])
def test_ways_that_are_not_offered(name: object) -> None:
    with pytest.raises(ConfigError, match="is not offered; choose one of int8, fp8, fp8_per_block"):
        find_quantization(name)
