"""Attention over pages on a TPU: interpreted against the reference, compiled at the shapes of real models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tpu_kernels import CHIPS, MODELS, Shape, compile_for, paged_attention
from pallas_kernels import attention, dispatch
from pallas_kernels.attention import reference, tpu
from tests.helpers import assert_close
from tests.kernels.on_tpu import copies, interpreted


def arguments(
    batch: int, tokens: int, kv_heads: int, repeats: int, width: int, page_size: int, pages: int, dtype: Any
) -> Any:
    """Windows anywhere in their rows, the first row's at its start and the last row's at its end. Whatever no query
    may see by pages is NaN; the pages lie in any order."""
    rng = np.random.default_rng(tokens)
    count = batch * pages + 1
    table = rng.permutation(count)[: batch * pages].reshape(batch, pages).astype(np.int32)
    start = rng.integers(0, pages * page_size - tokens + 1, batch)
    start[0], start[-1] = 0, pages * page_size - tokens
    positions = start[:, None] + np.arange(tokens)[None]
    used = np.zeros(count, bool)
    for row, last in enumerate(positions.max(1) // page_size):
        used[table[row, : last + 1]] = True
    pools = [rng.normal(size=(kv_heads, count, page_size, width)) for _ in range(2)]
    pools = [jnp.asarray(np.where(used[None, :, None, None], pool, np.nan), dtype) for pool in pools]
    q = jnp.asarray(rng.normal(size=(batch, tokens, kv_heads * repeats, width)), dtype)
    return q, *pools, jnp.asarray(table), jnp.asarray(positions, jnp.int32)


def expected(q: Any, keys: Any, values: Any, table: Any, positions: Any) -> jax.Array:
    return jax.jit(reference.paged_attention)(q, jnp.nan_to_num(keys), jnp.nan_to_num(values), table, positions)


@pytest.mark.parametrize(
    ("shape", "keys", "rows"),
    [
        ((3, 3, 2, 2, 128, 8, 5), 16, 512),
        ((2, 1, 1, 6, 256, 8, 4), 512, 512),
        ((2, 20, 1, 2, 256, 8, 4), 16, 32),
    ],
    ids=["window, several blocks", "one token, one block", "prompt in two steps"],
)
def test_as_the_reference(shape: tuple[int, ...], keys: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "MAX_KEYS", keys)
    monkeypatch.setattr(tpu, "MAX_ROWS", rows)
    args = arguments(*shape, jnp.float32)  # type: ignore[call-arg,arg-type]
    assert_close(interpreted(tpu.paged_attention, *args), expected(*args), 1e-5)


def test_bfloat16_at_width_64() -> None:
    args = arguments(2, 2, 1, 2, 64, 16, 2, jnp.bfloat16)
    got = interpreted(tpu.paged_attention, *args)
    assert got.dtype == jnp.bfloat16
    exact = expected(*(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args))
    assert_close(got, exact, 5e-3)


def test_scores_beyond_the_range_of_an_exponential() -> None:
    q, *rest = arguments(1, 3, 1, 1, 128, 8, 2, jnp.float32)
    assert_close(interpreted(tpu.paged_attention, 100 * q, *rest), expected(100 * q, *rest), 1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 1, 1, 1, 96, 8, 2), jnp.float32, "head width 96"),
        ((1, 1, 1, 1, 128, 8, 2), jnp.bfloat16, "pages of 8 tokens"),
        ((1, 1, 1, 1, 128, 16, 2), jnp.float16, "float16 queries"),
    ],
    ids=["width", "page", "type"],
)
def test_what_it_cannot_do_falls_back_and_says_so(shape: tuple[int, ...], dtype: Any, reason: str) -> None:
    args = arguments(*shape, dtype)  # type: ignore[call-arg,arg-type]
    args = (args[0], *map(jnp.nan_to_num, args[1:3]), *args[3:])
    with pytest.raises(NotImplementedError, match=reason):
        attention.paged_attention(*args, implementation="tpu")
    with dispatch.using("tpu"):
        got = attention.paged_attention(*args)
    assert reason in dispatch.fallbacks()["attention.paged_attention"]
    assert np.array_equal(got, attention.paged_attention(*args, implementation="reference"))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (MODELS["Qwen3.5-9B"], 4),
        (MODELS["Qwen3.5-27B"], 8),
        (MODELS["Qwen3.5-35B-A3B"], 1),
        (MODELS["Qwen3.5-9B"], 256),
        (Shape(0, 0, 32, 8, 128, 0), 4),
    ],
    ids=["9B window", "27B window", "35B-A3B token", "9B prompt", "width 128"],
)
def test_compiles_and_copies_no_cache(chip: str, shape: Shape, tokens: int) -> None:
    case = paged_attention(shape, 4, tokens, length=4096)
    compiled = compile_for(case, chip)
    assert not copies(compiled, case.args[1])
    queries, pool = (case.args[i].size * 2 for i in (0, 1))
    assert compiled.memory_analysis().temp_size_in_bytes < pool / 8 + 8 * queries


def test_copies_are_found() -> None:
    """At width 64 the compiler changes the layout of the pools."""
    case = paged_attention(Shape(0, 0, 8, 2, 64, 0), 4, 4, length=4096)
    assert len(copies(compile_for(case, "v5e"), case.args[1])) == 2
