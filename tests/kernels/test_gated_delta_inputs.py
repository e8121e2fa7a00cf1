"""What lies between projections and delta rule: as the layer composes it, and the kernel of GPUs interpreted."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.gated_delta import Gates, inputs, inputs_gpu, inputs_reference
from tests.helpers import assert_close

TAPS, KEY, VALUE = 4, 16, 8


def arguments(batch: int, window: int, before: int, key_heads: int, repeats: int, dtype: Any = jnp.float32) -> Any:
    """Row i has accepted i of the last window's `before` tokens (modulo `before` + 1); its last tokens are padding."""
    rng, heads = np.random.default_rng(batch + window), key_heads * repeats
    channels = 2 * key_heads * KEY + heads * VALUE
    normal = lambda *shape: jnp.asarray(3 * rng.normal(size=shape), dtype)
    single = lambda *shape: jnp.asarray(rng.random(shape), jnp.float32)
    both = normal(batch, window, 2 * heads + 1)  # as `gates_at` has it
    gates = Gates(both, both, single(heads), single(heads))
    start = jnp.arange(batch, dtype=jnp.int32) % (before + 1)
    valid = jnp.arange(window)[None] < window - jnp.arange(batch)[:, None] % 2
    past, qkv = normal(batch, TAPS - 1 + before, channels), normal(batch, window, channels + 5)
    return past, start, qkv, gates, valid, normal(TAPS, channels)


def sizes_of(key_heads: int, repeats: int) -> dict[str, Any]:
    return {"key_heads": key_heads, "key_width": KEY, "gates_at": (1 + key_heads * repeats, 1)}


@pytest.mark.parametrize(
    ("batch", "window", "before", "key_heads", "repeats"), [(4, 3, 3, 2, 2), (2, 1, 2, 1, 3), (3, 4, 1, 2, 1)]
)
def test_the_kernel_as_the_reference(batch: int, window: int, before: int, key_heads: int, repeats: int) -> None:
    """Every accepted count; windows that keep their width, in place, and that change it; projections side by side."""
    args, sizes = arguments(batch, window, before, key_heads, repeats), sizes_of(key_heads, repeats)
    (kept, got), (history, want) = (
        jax.jit(partial(f, **sizes))(*args) for f in (inputs_gpu.interpreted, inputs_reference.inputs)
    )
    assert jnp.array_equal(kept, history)
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert_close(a, b, 1e-6, name)
    assert not jnp.where(args[4][..., None], 0.0, got.beta).any()


def test_half_precision_is_rounded_where_the_reference_rounds() -> None:
    args, sizes = arguments(2, 3, 3, 2, 2, jnp.bfloat16), sizes_of(2, 2)
    (kept, got), (history, want) = (
        jax.jit(partial(f, **sizes))(*args) for f in (inputs_gpu.interpreted, inputs_reference.inputs)
    )
    assert kept.dtype == jnp.bfloat16 and jnp.array_equal(kept, history)
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a.dtype == jnp.float32
        assert_close(a, b, 1e-3, name)


def test_the_reference_in_numpy() -> None:
    past, start, qkv, gates, valid, weight = arguments(3, 3, 3, 2, 2)
    history, found = jax.jit(partial(inputs, **sizes_of(2, 2)))(past, start, qkv, gates, valid, weight)
    a, b = gates.a[..., 5:], gates.b[..., 1:5]
    past, qkv, weight, a, b = (np.asarray(x, np.float64) for x in (past, qkv, weight, a, b))
    for row in range(3):
        rows = np.concatenate([past[row, row : row + TAPS - 1], qkv[row, :, :-5]])
        assert_close(history[row], rows, 1e-6)
        total = np.stack([(rows[t : t + TAPS] * weight).sum(0) for t in range(3)])
        mixed = total / (1 + np.exp(-total))
        heads = mixed[:, : 4 * KEY].reshape(3, 4, KEY)
        heads = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6)
        assert_close(found.q[row], heads[:, :2] / np.sqrt(KEY), 1e-5)
        assert_close(found.k[row], heads[:, 2:], 1e-5)
        assert_close(found.v[row], mixed[:, 4 * KEY :].reshape(3, 4, VALUE), 1e-5)
    real = np.asarray(valid)[..., None]
    rate = np.log1p(np.exp(a + np.asarray(gates.dt_bias)))
    assert_close(found.g, np.where(real, -np.exp(np.asarray(gates.a_log)) * rate, 0), 1e-5)
    assert_close(found.beta, np.where(real, 1 / (1 + np.exp(-b)), 0), 1e-5)


def test_what_the_kernel_cannot_do() -> None:
    past, *rest = arguments(1, 2, 1, 1, 1)
    sizes = sizes_of(1, 1)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        inputs(past, *rest, **sizes, implementation="gpu")
    with pytest.raises(NotImplementedError, match="in float32 after others in bfloat16"):
        inputs_gpu.interpreted(past.astype(jnp.bfloat16), *rest, **sizes)
    with pytest.raises(NotImplementedError, match="12 and 16: widths must be powers of two"):
        inputs_gpu.interpreted(past, *rest, key_heads=1, key_width=12)
    with dispatch.using("gpu"):
        assert inputs(past, *rest, **sizes)[0].shape == (1, TAPS + 1, past.shape[2])
    assert "for GPUs" in dispatch.fallbacks()["gated_delta.inputs"]
