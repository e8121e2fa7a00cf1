"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", arXiv 2412.06464).

One recurrence, three uses: `chunked` for prefill and training, `window` for the few tokens that one cycle verifies
without touching the committed state, `fold` to write the accepted ones into it later. `step` is fold and window in one.
`inputs` makes a window's queries, keys, values and gates of a layer's projections.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from pallas_kernels import dispatch, proof
from pallas_kernels.gated_delta import inputs_reference, reference
from pallas_kernels.gated_delta.inputs_reference import Gates, Inputs, prepared
from pallas_kernels.gated_delta.reference import Pending, fold, path, recurrent, window

__all__ = ["Gates", "Inputs", "Pending", "chunked", "fold", "inputs", "path", "prepared", "recurrent", "step", "window"]


def chunked(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    segment_ids: Array | None = None,
    chunk: int = 64,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """The rule over a whole row, a chunk of tokens at a time.

    Args:
      q, k: [B,T,K,M], normed, q scaled. v: [B,T,K*R,P]. g, beta: [B,T,K*R], both 0 on padding. state: [B,K*R,M,P], what
        the first token's segment starts from. segment_ids: [B,T] int32 of packed rows.
      chunk: tokens of a chunk of the reference, whose result does not depend on it.
      implementation: see `pallas_kernels.dispatch`. "tpu" has no gradients and takes no packed rows; the state stays in
        vector memory from the first chunk to the last. Not timed.

    Returns:
      outputs [B,T,K*R,P] and the last token's state, float32.
    """

    def plain(*args: Array, segment_ids: Array | None) -> tuple[Array, Array]:
        return reference.chunked(*args, segment_ids=segment_ids, chunk=chunk)

    implementations = {"reference": plain, "tpu": _chunked_tpu}
    args = (q, k, v, g, beta, state)
    return dispatch.call("gated_delta.chunked", implementation, implementations, *args, segment_ids=segment_ids)


def _chunked_tpu(*args: Array, segment_ids: Array | None) -> tuple[Array, Array]:
    from pallas_kernels.gated_delta import chunked_tpu  # Pallas takes a while to import

    return chunked_tpu.chunked(*args, segment_ids=segment_ids)


def step(
    state: Array,
    pending: Pending,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    parents: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """One cycle of a layer: folds what was accepted into the state, then verifies the next window from there.

    Args:
      state: [B,K*R,M,P] float32. pending: the last window and how much of it was accepted.
      q, k: [B,W,K,M], normed, q scaled. v: [B,W,K*R,P]. g, beta: [B,W,K*R], both 0 on padding.
      parents: [B,W] or [W] int32 of a tree of drafts: each token's parent, which comes before it, or -1 for what is
        committed. None is a chain. The `accepted` of a pending tree is the `path` of the last token accepted. The
        reference alone does trees, and the engine has no use for them yet: it drafts chains.
      implementation: see `pallas_kernels.dispatch`. All kernels read and write the state once, in place where the
        caller donates it. "gpu", the default on GPUs, is "mosaic" where that can do the job (Hopper, windows of up to
        8, widths of 128) and else "triton"; benchmarks/RESULTS.md compares them. "tpu" has been compared with the
        reference and compiled for every TPU, but not timed.

    Returns:
      outputs [B,W,K*R,P], updates [B,W,K*R,P] (the next `pending.updates`) and the committed state, all float32.
    """
    implementations: dict[str, Callable[..., tuple[Array, Array, Array]]] = {
        "reference": reference.step, "tpu": _tpu, "gpu": _gpu, "mosaic": _mosaic, "triton": _triton,
    }  # fmt: skip
    args = (state, pending, q, k, v, g, beta)
    return dispatch.call("gated_delta.step", implementation, implementations, *args, default="gpu", parents=parents)


def _tpu(*args: Any, parents: Array | None) -> tuple[Array, Array, Array]:
    _refuse_trees(args[1], parents)
    from pallas_kernels.gated_delta import tpu  # Pallas takes a while to import

    return tpu.step(*args)


def _gpu(*args: Any, parents: Array | None) -> tuple[Array, Array, Array]:
    try:
        return _mosaic(*args, parents=parents)
    except NotImplementedError as reason:
        dispatch.gave_way("gated_delta.step by Mosaic", reason)
        return _triton(*args, parents=parents)


def _mosaic(*args: Any, parents: Array | None) -> tuple[Array, Array, Array]:
    _refuse_trees(args[1], parents)
    dispatch.require_gpu()
    from pallas_kernels.gated_delta import mosaic  # Pallas takes a while to import

    mosaic.check(args[0], args[1], args[3])
    tiles = mosaic.tiles_for(args[0])
    kernel = partial(mosaic.step, tiles=tiles)
    _prove(f"gated_delta.step by Mosaic, {tiles}", kernel, args[3].shape[1])
    return kernel(*args)


def _triton(*args: Any, parents: Array | None) -> tuple[Array, Array, Array]:
    _refuse_trees(args[1], parents)
    dispatch.require_gpu()
    from pallas_kernels.gated_delta import triton

    tiles = triton.tiles_for(args[0])
    kernel = partial(triton.step, tiles=tiles)
    _prove(f"gated_delta.step by Triton, {tiles}", kernel, args[3].shape[1])
    return kernel(*args)


def _prove(name: str, kernel: Callable[..., Any], window: int) -> None:
    from pallas_kernels.gated_delta import triton

    case = partial(triton.small_case, window)
    proof.require(f"{name}, window {window}", kernel, reference.step, case, rtol=1e-4)


def _refuse_trees(pending: Pending, parents: Array | None) -> None:
    if parents is not None or pending.accepted.ndim > 1:
        raise NotImplementedError("trees of drafts: the kernels fold and verify chains")


def inputs(
    past: Array,
    start: Array,
    qkv: Array,
    gates: Gates,
    valid: Array,
    weight: Array,
    *,
    key_heads: int,
    key_width: int,
    gates_at: tuple[int, int] = (0, 0),
    implementation: str | None = None,
) -> tuple[Array, Inputs]:
    """From a layer's projections to what `step` takes: short convolution, SiLU, norms of keys and queries, gates.

    Args:
      past: [B,n,C], what the last window's call gave first. start: [B] int32, how many of its tokens were accepted: the
        L-1 inputs from there on are the convolution's tail.
      qkv: [B,W,C or more] of queries, keys and values, of which the first C count. valid: [B,W] bool.
      weight: [L,C], oldest tap first. gates_at: where in gates.a and gates.b the N that count begin, so that all
        projections of a layer may stand side by side in one array, of which nothing needs cutting out.
      implementation: see `pallas_kernels.dispatch`. "gpu", the default on GPUs, does it in one kernel, in the place of
        `past` where the caller donates it.

    Returns:
      the convolution's inputs [B,L-1+W,C], for the next call, and the window's `Inputs`.
    """
    implementations: dict[str, Callable[..., tuple[Array, Inputs]]] = {
        "reference": inputs_reference.inputs, "gpu": _inputs_gpu,
    }  # fmt: skip
    args = (past, start, qkv, gates, valid, weight)
    sizes: dict[str, Any] = {"key_heads": key_heads, "key_width": key_width, "gates_at": gates_at}
    return dispatch.call("gated_delta.inputs", implementation, implementations, *args, default="gpu", **sizes)


def _inputs_gpu(*args: Any, **sizes: Any) -> tuple[Array, Inputs]:
    dispatch.require_gpu()
    from pallas_kernels.gated_delta import inputs_gpu

    kernel, plain = (partial(f, **inputs_gpu.SMALL) for f in (inputs_gpu.inputs, inputs_reference.inputs))
    proof.require("gated_delta.inputs on this GPU", kernel, plain, inputs_gpu.small_case, rtol=1e-2)
    return inputs_gpu.inputs(*args, **sizes)
