"""Keys into their pages on a TPU: interpreted against the reference bit for bit, and compiled in place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tpu_kernels import CHIPS, MODELS, compile_for, write_pages
from pallas_kernels import attention
from pallas_kernels.attention import reference, write_tpu
from tests.kernels.on_tpu import copies, interpreted


def arguments(batch: int, tokens: int, kv_heads: int, width: int, page_size: int, dtype: Any) -> Any:
    """Rows of three pages: the first written from its start, the last beyond its end, the middle ones anywhere."""
    rng = np.random.default_rng(tokens)
    pages = jnp.asarray(rng.normal(size=(kv_heads, 3 * batch, page_size, width)), dtype)
    values = jnp.asarray(rng.normal(size=(batch, tokens, kv_heads, width)), dtype)
    table = jnp.asarray(rng.permutation(3 * batch).reshape(batch, 3), jnp.int32)
    start = rng.integers(0, 3 * page_size - tokens + 1, batch)
    start[0], start[-1] = 0, 3 * page_size - tokens + 1
    return pages, values, table, jnp.asarray(start[:, None] + np.arange(tokens)[None], jnp.int32)


@pytest.mark.parametrize(
    "shape", [(4, 4, 2, 128, 16, jnp.float32), (4, 21, 1, 256, 16, jnp.bfloat16)], ids=["window", "prompt"]
)
def test_bit_for_bit(shape: tuple[Any, ...]) -> None:
    """Every row its own number of valid tokens; rows with none before, between and after the others; none at all."""
    args = arguments(*shape)
    batch, tokens = shape[:2]
    for counts in ((0, tokens, 0, tokens - 1), (tokens, 1, 0, 0), (0, 0, 0, 0)):
        valid = jnp.arange(tokens)[None] < jnp.asarray(counts)[:, None]
        poisoned = (args[0], jnp.where(valid[..., None, None], args[1], jnp.nan), *args[2:])
        got = interpreted(write_tpu.write_pages, *poisoned, valid)
        assert np.array_equal(got, reference.write_pages(*args, valid))


def test_a_page_of_nobody_may_stand_in_many_rows() -> None:
    """Rows that write nothing touch nothing, even where their table names a page that another row writes to."""
    pages, values, table, positions = arguments(3, 2, 1, 128, 8, jnp.float32)
    table = table.at[:2].set(table[2, 0])
    positions = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32)[None], (3, 2))
    valid = jnp.asarray([[False], [False], [True]]) & jnp.ones((3, 2), bool)
    got = interpreted(write_tpu.write_pages, pages, values, table, positions, valid)
    assert np.array_equal(got, reference.write_pages(pages, values, table, positions, valid))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2, 2, 1, 96, 8, jnp.float32), "head width 96"),
        ((2, 2, 1, 128, 8, jnp.bfloat16), "pages of 8 tokens"),
        ((2, 2, 1, 128, 16, jnp.float16), "float16"),
        ((2, 1025, 1, 128, 512, jnp.float32), "1025 tokens"),
    ],
    ids=["width", "page", "type", "long"],
)
def test_what_it_cannot_do(shape: tuple[Any, ...], reason: str) -> None:
    args = arguments(*shape)
    with pytest.raises(NotImplementedError, match=reason):
        attention.write_pages(*args, jnp.ones(args[3].shape, bool), implementation="tpu")


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("tokens", [4, 256])
def test_compiles_in_place(chip: str, tokens: int) -> None:
    case = write_pages(MODELS["Qwen3.5-9B"], 4, tokens)
    compiled = compile_for(case, chip)
    assert not copies(compiled, case.args[0])
    assert compiled.memory_analysis().alias_size_in_bytes >= case.args[0].size * 2
