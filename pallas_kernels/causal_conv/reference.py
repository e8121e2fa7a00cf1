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
