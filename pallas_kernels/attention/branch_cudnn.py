"""Attention of the training-time test on an NVIDIA GPU: cuDNN for the shared keys, a few sums for the branch.

The softmax over shared keys and branch is merged by log-sum-exp. Written with p_ij = e^{s_ij - L} and L the log-sum-exp
over both, the gradient of the shared part is what flash attention's backward pass computes from (L, merged output): so
one custom_vjp surrounds the merge and gives it these. The public function has no use for that: it drops the cotangent
of its log-sum-exp. Hence jax's own primitives are called here, as they are in jax 0.10 and 0.11. Without a branch it is
plain causal attention.

Letters: B batch, T tokens, K key heads, G query heads of each, I branch keys, H width; of runs see `cudnn.Level`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.attention import branch, cudnn
from pallas_kernels.attention.cudnn import Level, Runs

Segments = Runs | Array | None  # an array is a mask [B,1,T,T] bool beside causality


def by_mask(q: Array, keys: Sequence[Array], values: Sequence[Array], segment_ids: Array | None = None) -> Array:
    """See `pallas_kernels.attention.branch_attention`; packed rows by a mask of T x T.

    Raises:
      NotImplementedError: what cuDNN cannot do, or not without a large mask.
    """
    cudnn.check(q, keys[0])
    if segment_ids is not None:
        cudnn.check_mask(q)
    return _attend(False, *_apart(q, keys, values), segment_ids)


def by_runs(q: Array, keys: Sequence[Array], values: Sequence[Array], segment_ids: Array) -> Array:
    """The same of packed rows by their runs; rows of too many go another way.

    Raises:
      NotImplementedError: what cuDNN cannot do, or not by runs.
    """
    cudnn.check(q, keys[0], packed=True)
    cudnn.check_runs(q)
    return _attend(True, *_apart(q, keys, values), segment_ids)


def _apart(q: Array, keys: Sequence[Array], values: Sequence[Array]) -> tuple[Array, ...]:
    """q, the shared keys and values [B,T,K,H], and those of the branch [B,T,I,K,H]."""
    stacked = lambda steps: jnp.stack(steps[1:], axis=2) if len(steps) > 1 else steps[0][:, :, None][:, :, :0]
    return q, keys[0], values[0], stacked(keys), stacked(values)


# Runs or mask is chosen inside of the rules: around them, the gradient would keep what either of the two would need.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(runs: bool, q: Array, k: Array, v: Array, own_k: Array, own_v: Array, segment_ids: Array | None) -> Array:
    return _attend_forward(runs, q, k, v, own_k, own_v, segment_ids)[0]


def _attend_forward(runs: bool, *args: Any) -> tuple[Array, Any]:
    *arrays, segment_ids = args
    out, total = _choose(runs, segment_ids, merged, _in_blocks, *arrays)
    return out, (*args, out, total)


def _attend_backward(runs: bool, residuals: Any, slope: Array) -> tuple[Array | None, ...]:
    *arrays, segment_ids, out, total = residuals
    slopes = _choose(runs, segment_ids, merged_slopes, _slopes_in_blocks, *arrays, out, total, slope)
    return (*slopes, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _choose(
    runs: bool, segment_ids: Array | None, by_cudnn: Callable[..., Any], in_blocks: Callable[..., Any], *arrays: Array
) -> Any:
    """`by_cudnn(segments, *arrays)`; where neither runs nor a mask will do, `in_blocks(segment_ids, *arrays)`."""
    if not runs or segment_ids is None:
        return by_cudnn(cudnn.segment_mask(segment_ids), *arrays)
    found = Runs.of(segment_ids)

    def otherwise(*arrays: Array) -> Any:
        try:
            cudnn.check_mask(arrays[0])
        except NotImplementedError:
            return in_blocks(segment_ids, *arrays)
        return by_cudnn(cudnn.segment_mask(segment_ids), *arrays)

    return lax.cond(found.fit, partial(by_cudnn, found), otherwise, *arrays)


def merged(segments: Segments, q: Array, k: Array, v: Array, own_k: Array, own_v: Array) -> tuple[Array, Array]:
    """The output [B,T,K*G,H], and the float32 log-sum-exp of all its scores [B,T,K,G]."""
    shared, shared_sum = flash_forward(q, k, v, segments)
    alone = jnp.moveaxis(shared_sum, 1, 2).reshape(*q.shape[:2], k.shape[2], -1)
    if not own_k.shape[2]:
        return shared, alone
    scores = _branch_scores(q, own_k)
    total = jnp.logaddexp(alone, jax.nn.logsumexp(scores, axis=-1))
    heads = (*total.shape, q.shape[-1])
    kept = jnp.exp(alone - total)[..., None]
    own = jnp.einsum("BTKGI,BTIKH->BTKGH", jnp.exp(scores - total[..., None]), own_v.astype(jnp.float32))
    return (shared.astype(jnp.float32).reshape(heads) * kept + own).reshape(q.shape).astype(q.dtype), total


def merged_slopes(
    segments: Segments, q: Array, k: Array, v: Array, own_k: Array, own_v: Array, out: Array, total: Array,
    slope: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """Gradients of q, k, v, own_k and own_v, for what `merged` gave."""
    flat = jnp.moveaxis(total.reshape(*total.shape[:2], -1), 2, 1)  # [B,K*G,T]
    dq, dk, dv = flash_backward(q, k, v, segments, flat, out, slope)
    if not own_k.shape[2]:
        return dq, dk, dv, own_k, own_v
    grouped = lambda x: x.astype(jnp.float32).reshape(*total.shape, -1)
    slopes, weights = grouped(slope), jnp.exp(_branch_scores(q, own_k) - total[..., None])
    mean = jnp.sum(slopes * grouped(out), axis=-1, keepdims=True)
    d_scores = weights * (jnp.einsum("BTKGH,BTIKH->BTKGI", slopes, own_v.astype(jnp.float32)) - mean)
    d_scores = d_scores * q.shape[-1] ** -0.5
    dq_own = jnp.einsum("BTKGI,BTIKH->BTKGH", d_scores, own_k.astype(jnp.float32)).reshape(q.shape)
    d_own_k = jnp.einsum("BTKGI,BTKGH->BTIKH", d_scores, grouped(q)).astype(own_k.dtype)
    d_own_v = jnp.einsum("BTKGI,BTKGH->BTIKH", weights, slopes).astype(own_v.dtype)
    return (dq.astype(jnp.float32) + dq_own).astype(q.dtype), dk, dv, d_own_k, d_own_v


def _in_blocks(segment_ids: Array, q: Array, k: Array, v: Array, own_k: Array, own_v: Array) -> tuple[Array, Array]:
    """As `merged`, by plain jnp; no log-sum-exp, which `_slopes_in_blocks` does without."""
    keys, values = ([x, *jnp.moveaxis(own, 2, 0)] for x, own in ((k, own_k), (v, own_v)))
    out = branch.branch_attention(q, keys, values, segment_ids=segment_ids).astype(q.dtype)
    return out, jnp.zeros_like(q[..., 0], dtype=jnp.float32).reshape(*k.shape[:3], -1)


def _slopes_in_blocks(segment_ids: Array, *args: Array) -> tuple[Array, ...]:
    *arrays, _, _, slope = args
    return jax.vjp(lambda *arrays: _in_blocks(segment_ids, *arrays)[0], *arrays)[1](slope)


def _branch_scores(q: Array, own_k: Array) -> Array:
    """float32 [B,T,K,G,I]."""
    grouped = q.reshape(*q.shape[:2], own_k.shape[3], -1, q.shape[-1]).astype(jnp.float32)
    return jnp.einsum("BTKGH,BTIKH->BTKGI", grouped, own_k.astype(jnp.float32)) * q.shape[-1] ** -0.5


def flash_forward(q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
    """Causal attention [B,T,K*G,H], and the float32 log-sum-exp of its scores [B,K*G,T]."""
    if not isinstance(segments, Runs):
        return cudnn_forward(q, k, v, segments)
    found = jnp.zeros_like(q), jnp.moveaxis(jnp.zeros_like(q[..., 0], dtype=jnp.float32), 1, 2)
    for level in segments.levels:

        def attend(found: tuple[Array, Array], level: Level = level) -> tuple[Array, Array]:
            out, log_sum = cudnn_forward(q, k, v, level)
            log_sums = jnp.where(level.own[:, None], level.by_token(log_sum), found[1])
            return jnp.where(level.own[..., None, None], out, found[0]), log_sums

        found = lax.cond(jnp.any(level.own), attend, lambda found: found, found)
    return found


def flash_backward(
    q: Array, k: Array, v: Array, segments: Segments, log_sum: Array, out: Array, slope: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, for the `log_sum` and `out` of a softmax over these and perhaps other keys."""
    slope, log_sum = slope.astype(out.dtype), log_sum.astype(jnp.float32)
    if not isinstance(segments, Runs):
        return cudnn_backward(q, k, v, segments, log_sum, out, slope)
    found = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    for level in segments.levels:

        def attend(found: tuple[Array, ...], level: Level = level) -> tuple[Array, ...]:
            slopes = cudnn_backward(q, k, v, level, level.by_run(log_sum), out, slope)
            return tuple(jnp.where(level.own[..., None, None], x, y) for x, y in zip(slopes, found, strict=True))

        found = lax.cond(jnp.any(level.own), attend, lambda found: found, found)
    return found


def cudnn_forward(q: Array, k: Array, v: Array, segments: Level | Array | None) -> tuple[Array, Array]:
    """As `flash_forward`. Of a level only its own tokens are written; the log-sum-exp is [B*M,K*G,S], run by run."""
    module, options, operands = _cudnn(q, k, v, segments)
    if isinstance(segments, Level):
        out, log_sum = module._dot_product_attention_fwd_p.bind(*operands, is_training=True, **options)
        return out.reshape(q.shape), log_sum
    out, log_sum = module._dot_product_attention_fwd_p_wrapper.bind(*operands, is_training=True, **options)
    return out, log_sum


def cudnn_backward(
    q: Array, k: Array, v: Array, segments: Level | Array | None, log_sum: Array, out: Array, slope: Array
) -> tuple[Array, Array, Array]:
    """As `flash_backward`, with the log-sum-exp as `cudnn_forward` gives it."""
    module, options, operands = _cudnn(q, k, v, segments)
    if isinstance(segments, Level):
        out, slope = (x.reshape(operands[0].shape) for x in (out, slope))
        dq, dk, dv, *_ = module._dot_product_attention_bwd_p.bind(*operands, log_sum, out, slope, **options)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
    bind = module._dot_product_attention_bwd_p_wrapper.bind
    dq, dk, dv, *_ = bind(*operands, log_sum, out, slope, **options)
    return dq, dk, dv


def _cudnn(
    q: Array, k: Array, v: Array, segments: Level | Array | None
) -> tuple[Any, dict[str, Any], tuple[Array, ...]]:
    """jax's module, and the arguments that both passes share."""
    from jax._src.cudnn import fused_attention_stablehlo as module

    scale, nothing = q.shape[-1] ** -0.5, jnp.zeros(0, q.dtype)
    bias, where, kind = nothing, [nothing] * 4, module.MaskType.CAUSAL
    if isinstance(segments, Level):
        kind = module.MaskType.PADDING_CAUSAL
        lengths = segments.lengths.reshape(segments.cut * q.shape[0], -1)
        where = [lengths, lengths, _offsets(segments, q), _offsets(segments, k)]
        q, k, v = (x.reshape(lengths.shape[0], -1, *x.shape[2:]) for x in (q, k, v))  # S tokens at a time
    elif segments is not None:
        bias = jnp.where(segments, 0.0, jnp.finfo(q.dtype).min / 2).astype(q.dtype)
    options = {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (bias.size > 0, False), "mask_type": kind,
        "layout": module.AttentionLayout.BTNH.value, "sliding_window_length": None,
    }  # fmt: skip
    return module, options, (q, k, v, bias, *where, nothing, nothing)


def _offsets(level: Level, x: Array) -> Array:
    """Where the runs begin in x [B,T,heads,H], in elements, as jax's primitives hand them on to cuDNN.

    [B*cut,M/cut+1] int32: one after another, B*M of them, and then as many times the end as fill it up. (The function
    around the primitives would number them by itself, up to jax 0.10 wrongly for keys of fewer heads than queries.)
    """
    batch, tokens, heads, width = x.shape
    starts = (level.starts + tokens * jnp.arange(batch, dtype=jnp.int32)[:, None]).reshape(-1)
    starts = jnp.pad(starts, (0, batch * level.cut), constant_values=batch * tokens)
    return (starts * (heads * width)).reshape(batch * level.cut, -1)


def with_gradients(attend: Callable[..., Array]) -> Callable[..., Any]:
    """What `proof.require` compares: the output of branch attention, and the gradients of its sum of squares."""

    def both(*args: Any) -> Any:
        out, pull = jax.vjp(lambda q, keys, values: attend(q, keys, values, segment_ids=args[3]), *args[:3])
        return out, pull(out)

    return both


def small_case() -> tuple[Any, ...]:
    """Arguments of `branch_attention` in bfloat16: three steps, grouped heads, packed rows."""
    rng = np.random.default_rng(0)
    normal = lambda heads: jnp.asarray(rng.normal(size=(2, 128, heads, 64)), jnp.bfloat16)
    ids = jnp.asarray(np.arange(128)[None] // np.array([[40], [64]]) + 1, jnp.int32)
    return normal(4), [normal(2) for _ in range(3)], [normal(2) for _ in range(3)], ids
