"""Blockwise attention of the training-time test against the dense form, in value and gradient."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from pallas_kernels.attention.branch import branch_attention, query_block
from tests.helpers import assert_close


def dense(q: Array, keys: Sequence[Array], values: Sequence[Array]) -> Array:
    """One [T, T + i] matrix a head, as EAGLE writes it."""
    groups = q.shape[2] // keys[0].shape[2]
    keys, values = ([jnp.repeat(x, groups, axis=2) for x in xs] for xs in (keys, values))
    shared = jnp.einsum("BTNH,BSNH->BNTS", q, keys[0])
    causal = jnp.tril(jnp.ones(shared.shape[2:], bool))
    own = [jnp.einsum("BTNH,BTNH->BNT", q, k)[..., None] for k in keys[1:]]
    logits = jnp.concatenate([jnp.where(causal[None, None], shared, -1e30), *own], axis=-1) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("BNTS,BSNH->BTNH", weights[..., : q.shape[1]], values[0])
    for j, v in enumerate(values[1:]):
        out += jnp.einsum("BNT,BTNH->BTNH", weights[..., q.shape[1] + j], v)
    return out


@pytest.mark.parametrize(("steps", "length", "block"), [(1, 13, 5), (3, 13, 5), (4, 12, 4), (2, 7, 512)])
def test_blockwise_equals_dense(steps: int, length: int, block: int) -> None:
    shapes = [(2, length, 4, 6)] + [(2, length, 2, 6)] * (2 * steps)
    q, *rest = (2 * jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))
    keys, values, cotangent = rest[:steps], rest[steps:], jax.random.normal(jax.random.key(99), q.shape)

    def grads(attention):  # noqa: ANN001, ANN202
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(attention(*x) * cotangent), argnums=(0, 1, 2)))

    blockwise = lambda q, k, v: branch_attention(q, k, v, block=block)
    assert_close(blockwise(q, keys, values), dense(q, keys, values))
    got, want = (jax.tree.leaves(grads(f)(q, keys, values)) for f in (blockwise, dense))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)


def test_blocks_shrink_with_batch_and_length() -> None:
    assert query_block(1, 100, 8) == 100 and query_block(8, 2048, 32) == 512
    assert query_block(8, 16384, 32) == 64 and query_block(64, 65536, 64) == 16


def test_no_square_matrix_is_kept_for_the_backward_pass() -> None:
    length, block = 64, 8
    q, k, v = (jnp.ones((1, length, n, 2)) for n in (2, 1, 1))
    loss = lambda q, k, v: jnp.sum(branch_attention(q, [k, k], [v, v], block=block))
    _, backward = jax.vjp(loss, q, k, v)
    assert max(x.size for x in jax.tree.leaves(backward)) < length * length
