"""Plain jnp form of what lies between a layer's projections and the delta rule, for a window.

Letters: B batch, W window, C channels = 2*K*M + N*P, K key heads of width M, N value heads of width P, L taps.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.causal_conv import causal_conv

EPS = 1e-6


class Inputs(NamedTuple):
    """What the delta rule takes, all float32: q, k [B,W,K,M], v [B,W,N,P], g, beta [B,W,N]."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


class Gates(NamedTuple):
    """a, b [B,W,N or more]: the projections that decays and strengths are made of; a_log, dt_bias [N] float32."""

    a: Array
    b: Array
    a_log: Array
    dt_bias: Array


def inputs(
    past: Array, start: Array, qkv: Array, gates: Gates, valid: Array, weight: Array, *, key_heads: int, key_width: int,
    gates_at: tuple[int, int] = (0, 0),
) -> tuple[Array, Inputs]:  # fmt: skip
    """The convolution's own inputs [B,L-1+W,C], of which the next window's tail is taken, and `Inputs`.

    Args:
      past: [B,n,C] what an earlier call gave; start: [B] int32, the first of the L-1 of these that come before qkv.
      qkv: [B,W,C or more], of which the first C count. valid: [B,W] bool, False on padding.
      weight: [L,C], oldest tap first. gates_at: where in gates.a and gates.b the N that count begin.
    """
    a, b = (x[..., at : at + len(gates.a_log)] for x, at in zip(gates[:2], gates_at, strict=True))
    before = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, weight.shape[0] - 1))(past, start)
    history = jnp.concatenate([before, qkv[..., : weight.shape[1]]], axis=1)
    gates = gates._replace(a=a, b=b)
    return history, prepared(causal_conv(history, weight), gates, valid, key_heads=key_heads, key_width=key_width)


def prepared(convolved: Array, gates: Gates, valid: Array | None, *, key_heads: int, key_width: int) -> Inputs:
    """`Inputs` of what leaves the convolution [B,T,C]; `valid` [B,T] None: all of it."""
    batch, tokens, heads = gates.a.shape
    width = key_heads * key_width
    q, k, v = jnp.split(convolved, [width, 2 * width], axis=-1)
    q, k = (_unit(x.reshape(batch, tokens, key_heads, key_width)) for x in (q, k))
    rate = jax.nn.softplus(gates.a.astype(jnp.float32) + gates.dt_bias[None, None])
    g, beta = -jnp.exp(gates.a_log)[None, None] * rate, jax.nn.sigmoid(gates.b.astype(jnp.float32))
    if valid is not None:
        g, beta = (jnp.where(valid[..., None], x, 0.0) for x in (g, beta))
    v = v.reshape(batch, tokens, heads, -1).astype(jnp.float32)
    return Inputs(q * key_width**-0.5, k, v, g, beta)


def _unit(x: Array) -> Array:
    """Of length 1, as flash-linear-attention does it."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)
