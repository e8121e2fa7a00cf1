"""The GPU kernels become Triton programs, which needs no GPU; what the device makes of them, benchmarks show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.attention import gpu as attention
from pallas_kernels.gated_delta import Gates, Pending, inputs_gpu
from pallas_kernels.gated_delta import triton as gated_delta
from pallas_kernels.norm import gpu as norm
from pallas_kernels.quantized_matmul import gpu as quantized_matmul
from pallas_kernels.verification import Sampling, draw_gpu, thresholds_gpu

HOPPER = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu")
)
SLOTS, KEY_HEADS, HEADS, WIDTH = 8, 16, 32, 128


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((SLOTS, *shape), dtype)


def delta_step(window: int) -> tuple[Callable[..., Any], Any]:
    keys, values, gates = of(window, KEY_HEADS, WIDTH), of(window, HEADS, WIDTH), of(window, HEADS)
    pending = Pending(keys, values, gates, of(dtype=jnp.int32))
    return gated_delta.step, (of(HEADS, WIDTH, WIDTH), pending, keys, keys, values, gates, gates)


def walk(window: int) -> tuple[Callable[..., Any], Any]:
    """As `delta_step`, of so many slots that their heads are walked down."""
    step, arguments = delta_step(window)
    return partial(step, tiles=gated_delta.WALK), arguments


def pages(window: int) -> tuple[Callable[..., Any], Any]:
    pool = jax.ShapeDtypeStruct((4, 80, 64, 256), jnp.bfloat16)
    whole = of(window, 16, 256, dtype=jnp.bfloat16), pool, pool, of(10, dtype=jnp.int32), of(window, dtype=jnp.int32)
    return attention.paged_attention, whole


def delta_inputs(window: int) -> tuple[Callable[..., Any], Any]:
    half = lambda *shape: of(*shape, dtype=jnp.bfloat16)
    head, channels = jax.ShapeDtypeStruct((HEADS,), jnp.float32), (2 * KEY_HEADS + HEADS) * WIDTH
    merged = half(window, channels + HEADS * WIDTH + 2 * HEADS)
    gates = Gates(merged, merged, head, head)
    weight = jax.ShapeDtypeStruct((4, channels), jnp.bfloat16)
    valid = of(window, dtype=jnp.bool_)
    args = half(3 + window, channels), of(dtype=jnp.int32), merged, gates, valid, weight
    at = channels + HEADS * WIDTH
    return partial(inputs_gpu.inputs, key_heads=KEY_HEADS, key_width=WIDTH, gates_at=(at + HEADS, at)), args


def thresholds(window: int) -> tuple[Callable[..., Any], Any]:
    return thresholds_gpu.threshold, (of(window, 248320), of(window), of(window))


def draws(window: int) -> tuple[Callable[..., Any], Any]:
    row, count, switches = of(), of(dtype=jnp.int32), of(window, dtype=jnp.bool_)
    sampling = Sampling(row, row, count, row, of(16, dtype=jnp.int32), switches)
    ids = None if window > 1 else jax.ShapeDtypeStruct((248320,), jnp.int32)
    words = of(window, dtype=jnp.uint32), of(window, 2, dtype=jnp.uint32)
    return draw_gpu.draw, (of(window, 248320), *words, sampling, ids)


def norms(window: int) -> tuple[Callable[..., Any], Any]:
    width = 4096 if window == 1 else 2560  # that of a 4B target, no power of two
    stream, weight = of(window, width, dtype=jnp.bfloat16), jax.ShapeDtypeStruct((width,), jnp.bfloat16)
    return partial(norm.add_rms_norm, eps=1e-6, offset=1.0), (stream, stream, weight)


def products(window: int) -> tuple[Callable[..., Any], Any]:
    kind, blocks = (jnp.int8, 1) if window == 1 else (jnp.float8_e4m3fn, 32)
    values, scale = jax.ShapeDtypeStruct((4096, 24576), kind), jax.ShapeDtypeStruct((blocks, 24576), jnp.float32)
    return partial(quantized_matmul.quantized_matmul, block=128), (of(window, 4096, dtype=jnp.bfloat16), values, scale)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("kernel", [delta_step, walk, delta_inputs, pages, thresholds, draws, norms, products])
def test_at_the_shapes_of_a_9b_target(kernel: Any, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    function, arguments = kernel(window)
    with use_abstract_mesh(HOPPER):  # jax 0.11 asks the device for its compute capability
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()
