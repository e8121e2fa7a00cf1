"""The short convolution against torch, and in pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pallas_kernels.causal_conv import causal_conv
from tests.helpers import assert_close


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_as_torch(taps: int, tokens: int) -> None:
    rng = np.random.default_rng(taps)
    inputs = rng.normal(size=(2, taps - 1 + tokens, 6)).astype(np.float32)
    weight = rng.normal(size=(taps, 6)).astype(np.float32)
    kernel = torch.tensor(weight.T[:, None].copy())
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(torch.tensor(inputs).mT, kernel, groups=6)).mT
    got = causal_conv(jnp.asarray(inputs), jnp.asarray(weight))
    assert_close(got, want, 1e-6)


def test_in_pieces_with_the_tail_of_the_piece_before() -> None:
    rng = np.random.default_rng(0)
    inputs, weight = jnp.asarray(rng.normal(size=(2, 3 + 10, 6))), jnp.asarray(rng.normal(size=(4, 6)))
    whole = causal_conv(inputs, weight)
    pieces = [causal_conv(inputs[:, a : b + 3], weight) for a, b in ((0, 1), (1, 3), (3, 10))]
    assert_close(jnp.concatenate(pieces, axis=1), whole, 1e-6)


def test_bfloat16_is_accumulated_in_float32() -> None:
    rng = np.random.default_rng(0)
    inputs, weight = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 12, 6), (4, 6)))
    got = causal_conv(inputs, weight)
    assert got.dtype == jnp.bfloat16
    want = causal_conv(inputs.astype(jnp.float32), weight.astype(jnp.float32))
    assert jnp.array_equal(got, want.astype(jnp.bfloat16))


def test_gradient_as_torch() -> None:
    rng = np.random.default_rng(0)
    inputs, weight = (rng.normal(size=s).astype(np.float32) for s in ((2, 12, 6), (4, 6)))
    x, w = (torch.tensor(a, requires_grad=True) for a in (inputs, weight))
    torch.nn.functional.silu(torch.nn.functional.conv1d(x.mT, w.mT[:, None], groups=6)).square().sum().backward()
    loss = lambda x, w: jnp.sum(jnp.square(causal_conv(x, w)))  # noqa: E731
    got = jax.grad(loss, argnums=(0, 1))(jnp.asarray(inputs), jnp.asarray(weight))
    assert_close(got[0], x.grad, 1e-5)
    assert_close(got[1], w.grad, 1e-5)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_packed_segments_as_each_alone(taps: int) -> None:
    rng = np.random.default_rng(0)
    lengths = [2, 1, 5, 1, 3, 8]
    ids = np.tile(np.repeat(np.arange(6, dtype=np.int32), lengths), (2, 1))
    inputs = rng.normal(size=(2, taps - 1 + 20, 6)).astype(np.float32)
    weight = jnp.asarray(rng.normal(size=(taps, 6)), jnp.float32)
    got, start = causal_conv(jnp.asarray(inputs), weight, jnp.asarray(ids)), 0
    for i, length in enumerate(lengths):
        own = inputs[:, taps - 1 + start : taps - 1 + start + length]
        history = inputs[:, : taps - 1] if i == 0 else np.zeros_like(inputs[:, : taps - 1])
        alone = causal_conv(jnp.concatenate([history, own], axis=1), weight)
        assert_close(got[:, start : start + length], alone, 1e-6)
        start += length
