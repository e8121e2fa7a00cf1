"""Grouped-query attention: causal over whole rows, with branches for training, and over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax import Array

from pallas_kernels import dispatch, proof
from pallas_kernels.attention import branch, branch_cudnn, cudnn, reference
from pallas_kernels.attention.reference import attention

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
    return branch.branch_attention(q, [k], [v], segment_ids=segment_ids).astype(q.dtype)


def _causal_cudnn(q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
    return _branch_cudnn(q, [k], [v], segment_ids)


_CAUSAL = {"reference": _blocks, "cudnn": _causal_cudnn}


def branch_attention(
    q: Array,
    keys: Sequence[Array],
    values: Sequence[Array],
    *,
    segment_ids: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Attention of EAGLE-3's training-time test: causal over the keys of step 0, and to a position's own later keys.

    Args:
      q: [B,T,K*R,H]. keys, values: [B,T,K,H] of each step 0 .. i. segment_ids: as of `causal_attention`.
      implementation: "reference" (plain jnp, in blocks of queries computed again for the gradient), "cudnn" (NVIDIA
        GPUs, half precision), or None: cuDNN where it can do the job (benchmarks/RESULTS.md says why). Neither keeps a
        T x T matrix of scores; of packed rows, cuDNN takes a T x T mask on a mesh.

    Returns:
      [B,T,K*R,H] in the dtype of the values; differentiable in q, keys and values.
    """

    def blocks(q: Array, keys: Sequence[Array], values: Sequence[Array], segment_ids: Array | None) -> Array:
        return branch.branch_attention(q, keys, values, segment_ids=segment_ids)

    choice: dict[str, Callable[..., Array]] = {"reference": blocks, "cudnn": _branch_cudnn}
    arguments = (q, list(keys), list(values), segment_ids)
    return dispatch.call("branch_attention", implementation, choice, *arguments, default="cudnn")


def _branch_cudnn(*args: Any) -> Array:
    q, (k, *_), _, segment_ids = args
    cudnn.check(q, k)
    if segment_ids is not None:
        try:
            cudnn.check(q, k, packed=True)
            cudnn.check_runs(q)
            _require_cudnn("packed rows by their runs", branch_cudnn.by_runs)
            return branch_cudnn.by_runs(*args)
        except NotImplementedError as reason:
            dispatch.gave_way("packed rows by their runs", reason)
    _require_cudnn("branch_attention by cuDNN", branch_cudnn.by_mask)
    return branch_cudnn.by_mask(*args)


def _require_cudnn(name: str, attend: Callable[..., Array]) -> None:
    kernel, plain = (branch_cudnn.with_gradients(f) for f in (attend, branch.branch_attention))
    proof.require(f"{name} on this GPU", kernel, plain, branch_cudnn.small_case, 2e-2)


def write_pages(
    pages: Array,
    values: Array,
    page_table: Array,
    positions: Array,
    valid: Array,
    *,
    implementation: str | None = None,
) -> Array:
    """Puts `values` [B,T,K,H] at `positions` [B,T] of each row's pages; invalid tokens are not written.

    Args:
      pages: [K, num_pages, page_size, H]. page_table: [B, pages_per_row] int32. valid: [B,T] bool.
      implementation: see `pallas_kernels.dispatch`. "tpu" is for rows whose positions ascend by one; it keeps the
        layout that "tpu" of `paged_attention` reads, so the two belong together. Not timed.

    Returns:
      the pages, in place where the caller donates them.
    """
    implementations = {"reference": reference.write_pages, "tpu": _write_tpu}
    args = (pages, values, page_table, positions, valid)
    return dispatch.call("attention.write_pages", implementation, implementations, *args)


def _write_tpu(*args: Any) -> Array:
    from pallas_kernels.attention import write_tpu

    return write_tpu.write_pages(*args)


def paged_attention(
    q: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    positions: Array,
    *,
    contiguous: bool = False,
    implementation: str | None = None,
) -> Array:
    """Queries at `positions` [B,T] see the cached keys at positions up to their own: a window, or a chunk of prompt.

    Args:
      q: [B,T,K*R,H]. key_pages, value_pages: [K, num_pages, page_size, H]. page_table: [B, pages_per_row] int32.
      contiguous: the table is the identity, so that the reference can read the pools where they lie.
      implementation: see `pallas_kernels.dispatch`. The kernels read the pages in use and no others, where the
        reference reads all that the table names. "gpu" is the default on GPUs for windows in half precision; "tpu" has
        been compared with the reference and compiled for every TPU, but not timed.

    Returns:
      [B,T,K*R,H] in the dtype of q; scale H^-0.5, softmax in float32.
    """

    def plain(*args: Array) -> Array:
        return reference.paged_attention(*args, contiguous=contiguous)

    on_gpu = partial(_gpu, contiguous=contiguous)
    implementations: dict[str, Callable[..., Array]] = {"reference": plain, "tpu": _tpu, "gpu": on_gpu}
    args = (q, key_pages, value_pages, page_table, positions)
    return dispatch.call("attention.paged_attention", implementation, implementations, *args, default="gpu")


def _tpu(*args: Any) -> Array:
    from pallas_kernels.attention import tpu  # Pallas takes a while to import

    return tpu.paged_attention(*args)


def _gpu(*args: Any, contiguous: bool) -> Array:
    dispatch.require_gpu()
    from pallas_kernels.attention import gpu

    proof.require("paged_attention on this GPU", gpu.paged_attention, reference.paged_attention, gpu.small_case, 2e-2)
    return gpu.paged_attention(*args, contiguous=contiguous)
