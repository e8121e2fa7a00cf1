"""The gated delta rule and the convolution before it. Letters: B batch, W window, T tokens of a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.cases.case import KERNEL, OURS, Case, Draw, Grid, Sizes, Way, implementations
from pallas_kernels import causal_conv, gated_delta


def cases(s: Sizes, g: Grid) -> Iterator[Case]:
    if s.key_heads:
        yield from (step(s, batch, window) for batch in g.state_batches for window in g.windows)
        ends = g.state_batches[0], g.state_batches[-1]
        yield from (inputs(s, batch, window) for batch in ends for window in g.windows)
        yield chunked(s, g.rows, g.length)
        yield chunked(s, 1, g.prompt)
        yield convolution(s, g.state_batches[-1], g.windows[-1])
        yield convolution(s, g.rows, g.length)


def step(s: Sizes, batch: int, window: int) -> Case:
    """The state must be read once and written once; the floor scales an array of its size in place."""

    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        _, k, v, g, _ = _inputs(draw, s, batch, window)
        pending = gated_delta.Pending(k, v, g, 1 + jnp.arange(batch, dtype=jnp.int32) % window)
        return _state(draw, s, batch), pending, *_inputs(draw, s, batch, window)

    size = 2 * 4 * batch * s.value_heads * s.key_width * s.value_width
    ways = implementations(gated_delta.step, "reference", KERNEL, *(["triton"] if KERNEL == "gpu" else []))
    exact, floor = gated_delta.reference.step, lambda state, *_: state * 0.999
    return Case("gated_delta.step", f"B {batch}, W {window}", make, ways, exact, floor, in_place=True, bytes=size)


def inputs(s: Sizes, batch: int, window: int) -> Case:
    """What lies between the projections and `step`."""
    channels = _channels(s)

    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        past, qkv = draw.half(batch, s.taps - 1 + window, channels), draw.half(batch, window, channels)
        start, valid = 1 + jnp.arange(batch, dtype=jnp.int32) % window, jnp.ones((batch, window), jnp.bool_)
        a, b = (draw.half(batch, window, s.value_heads) for _ in range(2))
        gates = gated_delta.Gates(a, b, draw.uniform(s.value_heads), draw.uniform(s.value_heads))
        return past, start, qkv, gates, valid, draw.half(s.taps, channels)

    def run(*args: Any, implementation: str) -> Any:
        sizes: dict[str, Any] = {"key_heads": s.key_heads, "key_width": s.key_width}
        return gated_delta.inputs(*args, **sizes, implementation=implementation)[::-1]

    ways = implementations(run, "reference", KERNEL)
    size = 4 * batch * ((s.taps - 1 + window) * channels + window * (channels + 3 * s.value_heads))
    exact, shape = ways["reference"].run, f"B {batch}, W {window}"
    return Case("gated_delta.inputs", shape, make, ways, exact, in_place=True, bytes=size)


def _channels(s: Sizes) -> int:
    return 2 * s.key_heads * s.key_width + s.value_heads * s.value_width


def chunked(s: Sizes, batch: int, tokens: int) -> Case:
    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        return *_inputs(draw, s, batch, tokens), _state(draw, s, batch)

    ways = implementations(gated_delta.chunked, *OURS)
    size = 4 * batch * tokens * 2 * (s.key_heads * s.key_width + s.value_heads * (s.value_width + 1))
    exact = gated_delta.recurrent
    return Case("gated_delta.chunked", f"B {batch}, T {tokens}", make, ways, exact, bytes=size)


def _state(draw: Draw, s: Sizes, batch: int) -> Array:
    return draw.normal(batch, s.value_heads, s.key_width, s.value_width)


def _inputs(draw: Draw, s: Sizes, batch: int, tokens: int) -> tuple[Array, ...]:
    """q, k, v, g and beta."""
    keys, gates = (batch, tokens, s.key_heads, s.key_width), (batch, tokens, s.value_heads)
    q, k, v = draw.unit(*keys) * s.key_width**-0.5, draw.unit(*keys), draw.normal(*gates, s.value_width)
    return q, k, v, -0.1 * draw.uniform(*gates), draw.uniform(*gates)


def convolution(s: Sizes, batch: int, tokens: int) -> Case:
    channels = _channels(s)

    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        return draw.half(batch, s.taps - 1 + tokens, channels), draw.half(s.taps, channels)

    def library(x: Array, weight: Array) -> Array:
        layout = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": channels}
        return jax.nn.silu(lax.conv_general_dilated(x, weight[:, None], (1,), "VALID", **layout))  # type: ignore[arg-type]

    ways = {"reference": Way(causal_conv.causal_conv), "XLA's convolution": Way(library)}
    size = 2 * batch * channels * (2 * tokens + s.taps - 1)
    return Case("causal_conv", f"B {batch}, T {tokens}", make, ways, causal_conv.causal_conv, bytes=size)
