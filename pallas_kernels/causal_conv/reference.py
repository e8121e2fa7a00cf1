"""Plain jnp form of the causal depthwise convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def causal_conv(inputs: Array, weight: Array, segment_ids: Array | None = None) -> Array:
    """SiLU of a depthwise convolution over the last `k` inputs of each token.

    Args:
      inputs: [B, k-1+T, C], the k-1 inputs before the first token, then the tokens' own.
      weight: [k, C], oldest tap first.
      segment_ids: [B, T] of packed rows, equal ids being neighbours: a token takes nothing from another segment. The
        inputs before the first token are of its segment.

    Returns:
      [B, T, C] in the dtype of `inputs`, accumulated in float32.
    """
    taps = weight.shape[0]
    tokens = inputs.shape[1] - taps + 1
    total = jnp.zeros((inputs.shape[0], tokens, inputs.shape[2]), jnp.float32)
    ids = None if segment_ids is None else jnp.pad(segment_ids, [(0, 0), (taps - 1, 0)], mode="edge")
    for i in range(taps):
        seen = inputs[:, i : i + tokens].astype(jnp.float32)
        if ids is not None:
            seen = jnp.where((ids[:, i : i + tokens] == ids[:, taps - 1 :])[..., None], seen, 0.0)
        total = total + seen * weight[i].astype(jnp.float32)[None, None]
    return jax.nn.silu(total).astype(inputs.dtype)


def causal_conv_tree(inputs: Array, weight: Array, parents: Array) -> Array:
    """As `causal_conv` for a tree of drafts: each token's last `k` inputs are its own and those of its ancestors.

    Args:
      inputs: [B, k-1+W, C], the k-1 inputs of the committed tail, then those of the window's tokens.
      parents: [B, W] or [W] int32: each token's parent, or -1 for the committed tail.
    """
    taps, shape = weight.shape[0], (inputs.shape[0], parents.shape[-1])
    every = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    total = jnp.zeros((*shape, inputs.shape[2]), jnp.float32)
    for i, seen in enumerate(_upwards(inputs, parents, every, taps, taps)):
        total = total + seen.astype(jnp.float32) * weight[taps - 1 - i].astype(jnp.float32)[None, None]
    return jax.nn.silu(total).astype(inputs.dtype)


def tree_tail(inputs: Array, taps: int, parents: Array, last: Array) -> Array:
    """[B, taps-1, C]: the tail after `last` [B] int32, the last token accepted; the committed one for -1.

    inputs, parents: as of `causal_conv_tree`.
    """
    newest_first = _upwards(inputs, parents, last[:, None], taps, taps - 1)
    return jnp.concatenate([inputs[:, :0], *reversed(newest_first)], axis=1)


def _upwards(inputs: Array, parents: Array, tokens: Array, taps: int, count: int) -> list[Array]:
    """Inputs [B,n,C] of `tokens` [B,n], of the parents of these, and so on, through the tail: `count` arrays."""
    parents = jnp.broadcast_to(parents.astype(jnp.int32), (inputs.shape[0], parents.shape[-1]))
    tail = jnp.broadcast_to(jnp.arange(-1, taps - 2, dtype=jnp.int32), (inputs.shape[0], taps - 1))
    before = jnp.concatenate([tail, jnp.maximum(parents, -1) + taps - 1], axis=1)  # of each of the inputs
    found, at = [], tokens + taps - 1
    for _ in range(count):
        found.append(jnp.take_along_axis(inputs, at[..., None], axis=1))
        at = jnp.take_along_axis(before, at, axis=1)
    return found
