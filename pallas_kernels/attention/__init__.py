"""Grouped-query attention: causal over whole rows, with branches for training, and over a paged cache."""

from __future__ import annotations

from jax import Array

from pallas_kernels import dispatch
from pallas_kernels.attention import cudnn
from pallas_kernels.attention.branch import branch_attention
from pallas_kernels.attention.reference import attention, paged_attention, write_pages

__all__ = ["attention", "branch_attention", "causal_attention", "paged_attention", "write_pages"]


def causal_attention(
    q: Array, k: Array, v: Array, *, segment_ids: Array | None = None, implementation: str | None = None
) -> Array:
    """Each token sees itself and what came before it; scale H^-0.5, softmax in float32.

    Args:
      q: [B,T,K*R,H]. k, v: [B,T,K,H], K key heads with R query heads each.
      segment_ids: [B,T] int32 of packed rows: tokens see those of their own number alone.
      implementation: "reference" (plain jnp, in blocks of queries), "cudnn" (NVIDIA GPUs, half precision), or None:
        cuDNN where it can do the job. See `pallas_kernels.dispatch`.

    Returns:
      [B,T,K*R,H] in the dtype of q.
    """
    return dispatch.call("causal_attention", implementation, _CAUSAL, q, k, v, segment_ids, default="cudnn")


def _blocks(q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
    return branch_attention(q, [k], [v], segment_ids=segment_ids).astype(q.dtype)


_CAUSAL = {"reference": _blocks, "cudnn": cudnn.causal_attention}
