"""Causal attention by cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

_LONGEST_PACKED = 8192  # segments become a bias of T x T, 128 MB a row at this length


def causal_attention(q: Array, k: Array, v: Array, segment_ids: Array | None = None) -> Array:
    """See `pallas_kernels.attention.causal_attention`.

    Raises:
      NotImplementedError: what cuDNN cannot do, or not without a large mask.
    """
    check(q, segment_ids)
    mask = segment_mask(segment_ids)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")


def segment_mask(segment_ids: Array | None) -> Array | None:
    """[B,1,T,T] bool."""
    return None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def check(q: Array, segment_ids: Array | None) -> None:
    """Raises NotImplementedError for what cuDNN cannot do with q [B,T,N,H]."""
    if jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN needs an NVIDIA GPU")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN attends in bfloat16 or float16, not {q.dtype}")
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        raise NotImplementedError(f"a head width of {q.shape[-1]}: cuDNN takes multiples of 8 up to 256")
    if segment_ids is not None and q.shape[1] > _LONGEST_PACKED:
        raise NotImplementedError(f"packed rows of {q.shape[1]} tokens: their mask would be too large")
