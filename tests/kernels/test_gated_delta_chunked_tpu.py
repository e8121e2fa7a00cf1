"""The delta rule over a prompt on a TPU: interpreted against the recurrence, compiled at the shapes of real models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tpu_kernels import CHIPS, MODELS, compile_for, delta_chunked
from pallas_kernels import dispatch
from pallas_kernels.gated_delta import chunked, chunked_tpu, reference
from tests.helpers import assert_close
from tests.kernels.on_tpu import copies, interpreted

WIDTH = 128


def arguments(kind: str, batch: int, tokens: int, key_heads: int, repeats: int) -> Any:
    """`alike`: keys nearly one another, decays nearly one. `forgetful`: decays to e^-60 a token beside tiny ones."""
    rng = np.random.default_rng(tokens)
    heads = key_heads * repeats
    normal = lambda *shape: rng.normal(size=(batch, *shape))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = normal(tokens, key_heads, WIDTH), normal(tokens, key_heads, WIDTH)
    g, beta = -rng.random((batch, tokens, heads)), rng.random((batch, tokens, heads))
    if kind == "alike":
        k, g, beta = 1 + 0.1 * k, 1e-3 * g, 1 - 0.01 * beta
    if kind == "forgetful":
        g = np.where(rng.random(g.shape) < 0.4, 60 * g, 0.01 * g)
    args = (unit(q) * WIDTH**-0.5, unit(k), normal(tokens, heads, WIDTH), g, beta, normal(heads, WIDTH, WIDTH))
    return tuple(jnp.asarray(x, jnp.float32) for x in args)


@pytest.mark.parametrize(
    ("kind", "batch", "tokens", "key_heads", "repeats"),
    [("plain", 2, 70, 1, 3), ("alike", 1, 150, 1, 1), ("forgetful", 1, 150, 1, 1), ("plain", 1, 5, 16, 1)],
    ids=["grouped", "alike", "forgetful", "two blocks of heads"],
)
def test_as_the_recurrence(kind: str, batch: int, tokens: int, key_heads: int, repeats: int) -> None:
    """Several chunks, a last one that is not full, and fewer tokens than a chunk, all from a state."""
    args = arguments(kind, batch, tokens, key_heads, repeats)
    got, want = interpreted(chunked_tpu.chunked, *args), jax.jit(reference.recurrent)(*args)
    for name, a, b in zip(("out", "state"), got, want, strict=True):
        assert_close(a, b, 1e-5, name)


def test_packed_rows_fall_back() -> None:
    args = arguments("plain", 1, 6, 1, 1)
    ids = jnp.asarray([[1, 1, 2, 2, 2, 3]])
    with pytest.raises(NotImplementedError, match="segments"):
        chunked(*args, segment_ids=ids, implementation="tpu")
    with dispatch.using("tpu"):
        got = chunked(*args, segment_ids=ids)
    assert "segments" in dispatch.fallbacks()["gated_delta.chunked"]
    for a, b in zip(got, jax.jit(reference.recurrent)(*args, segment_ids=ids), strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_with_the_state_in_place(chip: str) -> None:
    case = delta_chunked(MODELS["Qwen3.5-9B"], 2, 128)
    compiled = compile_for(case, chip)
    assert not copies(compiled, case.args[5])
    assert compiled.memory_analysis().alias_size_in_bytes >= case.args[5].size * 4
