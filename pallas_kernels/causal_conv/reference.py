"""Plain jnp form of the causal depthwise convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def causal_conv(inputs: Array, weight: Array) -> Array:
    """SiLU of a depthwise convolution over the last `k` inputs of each token.

    Args:
      inputs: [B, k-1+T, C], the k-1 inputs before the first token, then the tokens' own.
      weight: [k, C], oldest tap first.

    Returns:
      [B, T, C] in the dtype of `inputs`, accumulated in float32.
    """
    taps = weight.shape[0]
    tokens = inputs.shape[1] - taps + 1
    total = jnp.zeros((inputs.shape[0], tokens, inputs.shape[2]), jnp.float32)
    for i in range(taps):
        total = total + inputs[:, i : i + tokens].astype(jnp.float32) * weight[i].astype(jnp.float32)[None, None]
    return jax.nn.silu(total).astype(inputs.dtype)
