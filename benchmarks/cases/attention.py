"""Attention over a cache, over whole rows, and of the training-time test. Letters: B batch, W window, T, S tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.cases.case import KERNEL, OURS, Case, Draw, Grid, Sizes, Way, implementations
from pallas_kernels import attention
from pallas_kernels.attention import branch_cudnn, cudnn

PAGE, SEGMENTS = 64, 4
MASKED = "cudnn, by a mask"  # and not by where the segments lie
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None


def cases(s: Sizes, g: Grid) -> Iterator[Case]:
    for context in g.contexts:
        yield from (paged(s, batch, window, context) for batch in g.attention_batches for window in g.windows)
    yield written(s, g.attention_batches[-1], g.windows[-1], g.contexts[-1])
    for packed in (False, True):
        yield from (causal(s, g.rows, g.length, packed, slopes) for slopes in (False, True))
    yield from (branches(s, g.rows, g.length, steps) for steps in g.steps)
    yield branches(s, 1, 8 * g.length, g.steps[1])


def paged(s: Sizes, batch: int, window: int, context: int) -> Case:
    """The cache is full to its last token, so that the reference, which reads all of it, reads nothing in vain."""
    pages = -(-context // PAGE)

    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        k, v = (draw.half(s.kv_heads, batch * pages, PAGE, s.width) for _ in range(2))
        table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
        at = context - window + jnp.arange(window, dtype=jnp.int32)
        return draw.half(batch, window, s.heads, s.width), k, v, table, jnp.broadcast_to(at[None], (batch, window))

    def in_rows(q: Array, k: Array, v: Array, table: Array, at: Array) -> tuple[Array, ...]:
        k, v = (jnp.moveaxis(x.reshape(s.kv_heads, batch, -1, s.width), 0, 2) for x in (k, v))
        return q, k, v, at

    def library(q: Array, k: Array, v: Array, at: Array) -> Array:
        cudnn.check(q, k)
        seen = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, None] <= at[:, None, :, None]
        options: dict[str, Any] = {"mask": seen if window > 1 else None, "key_value_seq_lengths": at[:, -1] + 1}
        return jax.nn.dot_product_attention(q, k, v, **options, implementation="cudnn")

    contiguous = partial(attention.paged_attention, contiguous=True)
    ways = {**implementations(contiguous, "reference", KERNEL), "cudnn": Way(library, in_rows)}
    exact = partial(attention.reference.paged_attention, contiguous=True)
    shape, size = f"B {batch}, W {window}, S {context}", 2 * 2 * batch * context * s.kv_heads * s.width
    return Case("paged_attention", shape, make, ways, exact, bytes=size)


def written(s: Sizes, batch: int, window: int, context: int) -> Case:
    cached = paged(s, batch, window, context)

    def make(key: Array) -> tuple[Any, ...]:
        _, pool, _, table, at = cached.make(key)
        return pool, Draw(key).half(batch, window, s.kv_heads, s.width), table, at, at >= 0

    ways, exact = implementations(attention.write_pages, *OURS), attention.reference.write_pages
    size = 2 * 2 * batch * window * s.kv_heads * s.width
    return Case("write_pages", cached.shape, make, ways, exact, in_place=True, bytes=size)


def causal(s: Sizes, batch: int, length: int, packed: bool, slopes: bool) -> Case:
    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        of = lambda heads: draw.half(batch, length, heads, s.width)
        return _segments(batch, length, packed), of(s.heads), (of(s.heads), of(s.kv_heads), of(s.kv_heads))

    def run(ids: Any, slope: Array, qkv: Any, *, implementation: str) -> Any:
        ours = partial(attention.causal_attention, segment_ids=ids, implementation=implementation)
        attend = partial(_tokamax, segment_ids=ids) if implementation == "tokamax" else ours
        return _pulled(attend, slope, qkv, slopes)

    def masked(ids: Array, slope: Array, qkv: Any) -> Any:
        return _pulled(lambda q, k, v: branch_cudnn.by_mask(q, [k], [v], ids), slope, qkv, slopes)

    ways = implementations(run, "reference", "cudnn", *(["tokamax"] if HAS_TOKAMAX else []))
    ways |= {MASKED: Way(masked)} if packed else {}
    work = _flops(batch, length, s.heads * s.width, packed, slopes)
    operation = "causal_attention" + (", forward and backward" if slopes else "")
    return Case(operation, _row_shape(batch, length, packed), make, ways, ways["reference"].run, flops=work)


def _tokamax(q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
    tokamax: Any = importlib.import_module("tokamax")
    return tokamax.dot_product_attention(q, k, v, mask=cudnn.segment_mask(segment_ids), is_causal=True)


def branches(s: Sizes, batch: int, length: int, steps: int) -> Case:
    """The training-time test's last of `steps` steps, packed; the work of the branch itself is left out."""
    heads, kv_heads = s.draft_heads

    def make(key: Array) -> tuple[Any, ...]:
        draw = Draw(key)
        of = lambda heads: draw.half(batch, length, heads, 128)
        own = lambda: [of(kv_heads) for _ in range(steps)]
        return _segments(batch, length, True), of(heads), (of(heads), own(), own())

    def run(ids: Any, slope: Array, qkv: Any, *, implementation: str) -> Any:
        attend = partial(attention.branch_attention, segment_ids=ids, implementation=implementation)
        return _pulled(attend, slope, qkv, True)

    def masked(ids: Array, slope: Array, qkv: Any) -> Any:
        return _pulled(partial(branch_cudnn.by_mask, segment_ids=ids), slope, qkv, True)

    ways = implementations(run, "reference", "cudnn") | {MASKED: Way(masked)}
    work, shape = _flops(batch, length, heads * 128, True, True), _row_shape(batch, length, True)
    operation = "branch_attention, forward and backward"
    return Case(operation, f"{shape}, keys of {steps}", make, ways, ways["reference"].run, flops=work)


def _pulled(attend: Callable[..., Array], slope: Array, arguments: tuple[Any, ...], slopes: bool) -> Any:
    """The output, and with `slopes` the gradients of its product with `slope`."""
    if not slopes:
        return attend(*arguments)
    out, pull = jax.vjp(attend, *arguments)
    return out, pull(slope.astype(out.dtype))


def _segments(batch: int, length: int, packed: bool) -> Array | None:
    place = jnp.arange(length, dtype=jnp.int32) // max(length // SEGMENTS, 1)
    return jnp.broadcast_to(jnp.minimum(place, SEGMENTS - 1)[None], (batch, length)) if packed else None


def _row_shape(batch: int, length: int, packed: bool) -> str:
    return f"B {batch}, T {length}" + (f", {SEGMENTS} segments" if packed else "")


def _flops(batch: int, length: int, width: int, packed: bool, slopes: bool) -> int:
    """Two products over the half of T x T that is seen, and five more for the gradients."""
    seen = length * length // (2 * (SEGMENTS if packed else 1))
    return (7 if slopes else 2) * 2 * batch * seen * width
