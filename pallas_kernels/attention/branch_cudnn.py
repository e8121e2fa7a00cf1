"""Attention of the training-time test on an NVIDIA GPU: cuDNN for the shared keys, a few sums for the branch.

The softmax over shared keys and branch is merged by log-sum-exp. Written with p_ij = e^{s_ij - L} and L the log-sum-exp
over both, the gradient of the shared part is what flash attention's backward pass computes from (L, merged output): so
one custom_vjp surrounds the merge and gives it these. The public function has no use for that: it drops the cotangent
of its log-sum-exp. Hence jax's own primitives are called here, as they are in jax 0.10 and 0.11.

Letters: B batch, T tokens, K key heads, G query heads of each, I branch keys, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.attention import cudnn


def branch_attention(
    q: Array, keys: Sequence[Array], values: Sequence[Array], segment_ids: Array | None = None
) -> Array:
    """See `pallas_kernels.attention.branch_attention`.

    Raises:
      NotImplementedError: what cuDNN cannot do, or not without a large mask.
    """
    cudnn.check(q, segment_ids)
    if segment_ids is not None and q.shape[1] % 2:
        raise NotImplementedError(f"packed rows of {q.shape[1]} tokens: cuDNN's gradient takes an even number")
    return merged(q, keys, values, cudnn.segment_mask(segment_ids))


def merged(q: Array, keys: Sequence[Array], values: Sequence[Array], mask: Array | None) -> Array:
    """[B,T,K*G,H] from q, and keys and values [B,T,K,H] of steps 0 .. i; mask [B,1,T,T] bool beside causality."""
    if len(keys) == 1:
        none = keys[0][:, :, None][:, :, :0]
        return _merged(q, keys[0], values[0], none, none, mask)
    return _merged(q, keys[0], values[0], jnp.stack(keys[1:], axis=2), jnp.stack(values[1:], axis=2), mask)


@jax.custom_vjp
def _merged(q: Array, k: Array, v: Array, own_k: Array, own_v: Array, mask: Array | None) -> Array:
    return _merged_forward(q, k, v, own_k, own_v, mask)[0]


def _merged_forward(q: Array, k: Array, v: Array, own_k: Array, own_v: Array, mask: Array | None) -> tuple[Array, Any]:
    shared, shared_sum = flash_forward(q, k, v, mask)
    scores = _branch_scores(q, own_k)
    total = jnp.moveaxis(shared_sum, 1, 2).reshape(scores.shape[:-1])  # [B,T,K,G]
    if own_k.shape[2]:
        total = jnp.logaddexp(total, jax.nn.logsumexp(scores, axis=-1))
    heads = (*total.shape, q.shape[-1])
    kept = jnp.exp(jnp.moveaxis(shared_sum, 1, 2).reshape(total.shape) - total)[..., None]
    own = jnp.einsum("BTKGI,BTIKH->BTKGH", jnp.exp(scores - total[..., None]), own_v.astype(jnp.float32))
    out = (shared.astype(jnp.float32).reshape(heads) * kept + own).reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, own_k, own_v, mask, out, total)


def _merged_backward(residuals: Any, slope: Array) -> tuple[Array | None, ...]:
    q, k, v, own_k, own_v, mask, out, total = residuals
    flat = jnp.moveaxis(total.reshape(*total.shape[:2], -1), 2, 1)  # [B,K*G,T]
    dq, dk, dv = flash_backward(q, k, v, mask, flat, out, slope)
    if not own_k.shape[2]:
        return dq, dk, dv, own_k, own_v, None
    grouped = lambda x: x.astype(jnp.float32).reshape(*total.shape, -1)
    slopes, weights = grouped(slope), jnp.exp(_branch_scores(q, own_k) - total[..., None])
    mean = jnp.sum(slopes * grouped(out), axis=-1, keepdims=True)
    d_scores = weights * (jnp.einsum("BTKGH,BTIKH->BTKGI", slopes, own_v.astype(jnp.float32)) - mean)
    d_scores = d_scores * q.shape[-1] ** -0.5
    dq_own = jnp.einsum("BTKGI,BTIKH->BTKGH", d_scores, own_k.astype(jnp.float32)).reshape(q.shape)
    d_own_k = jnp.einsum("BTKGI,BTKGH->BTIKH", d_scores, grouped(q)).astype(own_k.dtype)
    d_own_v = jnp.einsum("BTKGI,BTKGH->BTIKH", weights, slopes).astype(own_v.dtype)
    return (dq.astype(jnp.float32) + dq_own).astype(q.dtype), dk, dv, d_own_k, d_own_v, None


_merged.defvjp(_merged_forward, _merged_backward)


def _branch_scores(q: Array, own_k: Array) -> Array:
    """float32 [B,T,K,G,I]."""
    grouped = q.reshape(*q.shape[:2], own_k.shape[3], -1, q.shape[-1]).astype(jnp.float32)
    return jnp.einsum("BTKGH,BTIKH->BTKGI", grouped, own_k.astype(jnp.float32)) * q.shape[-1] ** -0.5


def flash_forward(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array]:
    """Causal attention [B,T,K*G,H], and the float32 log-sum-exp of its scores [B,K*G,T]."""
    module, options, operands = _cudnn(q, k, v, mask)
    out, log_sum = module._dot_product_attention_fwd_p_wrapper.bind(*operands, is_training=True, **options)
    return out, log_sum


def flash_backward(
    q: Array, k: Array, v: Array, mask: Array | None, log_sum: Array, out: Array, slope: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, for the `log_sum` and `out` of a softmax over these and perhaps other keys."""
    module, options, operands = _cudnn(q, k, v, mask)
    bind = module._dot_product_attention_bwd_p_wrapper.bind
    dq, dk, dv, *_ = bind(*operands, log_sum.astype(jnp.float32), out, slope.astype(out.dtype), **options)
    return dq, dk, dv


def _cudnn(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Any, dict[str, Any], tuple[Array, ...]]:
    """jax's module, and the arguments that both passes share."""
    from jax._src.cudnn import fused_attention_stablehlo as module

    nothing = jnp.zeros(0, q.dtype)
    bias = nothing if mask is None else jnp.where(mask, 0.0, jnp.finfo(q.dtype).min / 2).astype(q.dtype)
    options = {
        "scale": q.shape[-1] ** -0.5, "seed": 42, "dropout_rate": 0.0, "variadic_args": (mask is not None, False),
        "mask_type": module.MaskType.CAUSAL, "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }  # fmt: skip
    return module, options, (q, k, v, bias, *[nothing] * 6)


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
