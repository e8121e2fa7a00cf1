"""Attention over pages on a GPU, interpreted, against the reference. What it is worth on one: benchmarks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import gpu, paged_attention
from tests.helpers import assert_close
from tests.kernels.test_attention_tpu import arguments, expected


@pytest.mark.parametrize(
    ("shape", "programs"),
    [((3, 3, 2, 2, 32, 16, 5), 18), ((2, 1, 1, 6, 64, 16, 4), 1), ((1, 4, 1, 4, 256, 64, 3), 264)],
    ids=["window in three shares", "one token in one share", "a share for every page"],
)
def test_as_the_reference(shape: tuple[int, ...], programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PROGRAMS", programs)
    args = arguments(*shape, jnp.float32)  # type: ignore[call-arg,arg-type]
    assert_close(jax.jit(gpu.interpreted)(*args), expected(*args), 1e-5)


def test_pages_in_order_are_found_without_their_table() -> None:
    q, keys, values, table, positions = arguments(2, 2, 1, 2, 32, 16, 3, jnp.float32)
    order = jnp.arange(6).reshape(2, 3)
    keys, values = (jnp.nan_to_num(x[:, :6]) for x in (keys, values))
    got = gpu.interpreted(q, keys, values, jnp.zeros_like(table), positions, contiguous=True)
    assert_close(got, expected(q, keys, values, order, positions), 1e-5)


def test_what_it_cannot_do() -> None:
    q, *rest = arguments(1, 2, 1, 2, 32, 16, 2, jnp.float32)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        paged_attention(q, *rest, implementation="gpu")
    with pytest.raises(NotImplementedError, match="at most 128"):
        gpu.interpreted(jnp.zeros((1, 65, 2, 32)), *rest)
    with pytest.raises(NotImplementedError, match="heads of 24"):
        gpu.interpreted(q[..., :24], *(x[..., :24] for x in rest[:2]), *rest[2:])


def test_half_precision() -> None:
    args = arguments(2, 2, 2, 2, 32, 16, 3, jnp.bfloat16)
    got, want = jax.jit(gpu.interpreted)(*args), expected(*args)
    assert got.dtype == jnp.bfloat16
    assert_close(np.asarray(got, np.float32), np.asarray(want, np.float32), 2e-2)
