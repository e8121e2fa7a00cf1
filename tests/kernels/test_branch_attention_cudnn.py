"""The merge around cuDNN's two passes, with plain forms in their place: value and gradients of the dense form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from pallas_kernels import proof
from pallas_kernels.attention import branch, branch_attention, branch_cudnn, cudnn
from tests.helpers import assert_close
from tests.kernels.test_branch_attention import dense


def probabilities(q: Array, k: Array, mask: Array | None, log_sum: Array | None) -> tuple[Array, Array]:
    """Weights [B,N,T,S] under a given or their own log-sum-exp [B,N,T], and that."""
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)) * q.shape[-1] ** -0.5
    visible = jnp.tri(q.shape[1], dtype=bool)[None, None]
    scores = jnp.where(visible if mask is None else visible & mask, scores, -1e30)
    log_sum = jax.nn.logsumexp(scores, axis=-1) if log_sum is None else log_sum
    return jnp.exp(scores - log_sum[..., None]), log_sum


def plain_forward(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array]:
    p, log_sum = probabilities(q, k, mask, None)
    return jnp.einsum("BNTS,BSNH->BTNH", p, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)), log_sum


def plain_backward(q: Array, k: Array, v: Array, mask: Any, log_sum: Array, out: Array, slope: Array) -> Any:
    """As flash attention computes it: from the log-sum-exp and the output that it is given."""
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    p, _ = probabilities(q, k, mask, log_sum)
    mean = jnp.sum(slope * out, axis=-1)
    ds = p * (jnp.einsum("BTNH,BSNH->BNTS", slope, wide_v) - jnp.moveaxis(mean, 1, 2)[..., None])
    ds = ds * q.shape[-1] ** -0.5
    narrow = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)
    dk, dv = jnp.einsum("BNTS,BTNH->BSNH", ds, q), jnp.einsum("BNTS,BTNH->BSNH", p, slope)
    return jnp.einsum("BNTS,BSNH->BTNH", ds, wide_k), narrow(dk), narrow(dv)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_merge_equals_the_reference(steps: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_cudnn, "flash_forward", plain_forward)
    monkeypatch.setattr(branch_cudnn, "flash_backward", plain_backward)
    shapes = [(2, 10, 4, 8)] + [(2, 10, 2, 8)] * (2 * steps)
    q, *rest = (2 * jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))
    keys, values, slope = rest[:steps], rest[steps:], jax.random.normal(jax.random.key(99), q.shape)
    ids = jnp.repeat(jnp.asarray([[1, 2], [1, 1]], jnp.int32), 5, axis=1) if packed else None
    mask = None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None]

    def wanted(q: Array, keys: list[Array], values: list[Array]) -> Array:
        if ids is None:
            return dense(q, keys, values)
        return branch_attention(q, keys, values, segment_ids=ids, implementation="reference")

    ours = lambda q, k, v: branch_cudnn.merged(q, k, v, mask)
    (got, pull), (want, pull_wanted) = (jax.vjp(f, q, keys, values) for f in (ours, wanted))
    assert_close(got, want)
    for a, b in zip(jax.tree.leaves(pull(slope)), jax.tree.leaves(pull_wanted(slope)), strict=True):
        assert_close(a, b)


def test_the_case_by_which_it_is_proven_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check", lambda *_: None)
    monkeypatch.setattr(branch_cudnn, "flash_forward", plain_forward)
    monkeypatch.setattr(branch_cudnn, "flash_backward", plain_backward)
    kernel, plain = (branch_cudnn.with_gradients(f) for f in (branch_cudnn.branch_attention, branch.branch_attention))
    assert proof._verdict(kernel, plain, branch_cudnn.small_case, 2e-2) is None
    monkeypatch.setattr(branch_cudnn, "flash_backward", lambda *args: plain_backward(*args[:-1], 1.1 * args[-1]))
    kernel = branch_cudnn.with_gradients(lambda *a, **k: branch_cudnn.branch_attention(*a, **k))
    assert "differs from the reference" in str(proof._verdict(kernel, plain, branch_cudnn.small_case, 2e-2))
