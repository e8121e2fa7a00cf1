"""The residual addition with its norm: the kernel of GPUs interpreted, and which passes of a model ask for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.cache import target_cache
from eagle3_jax.config import FULL, RopeConfig, TargetConfig
from eagle3_jax.target import Target
from pallas_kernels import dispatch, proof
from pallas_kernels.norm import add_rms_norm, gpu, reference
from tests.helpers import as_float64, assert_close

EPS = 1e-2  # large enough to be missed
TARGET = TargetConfig(
    model_type="llama", vocab_size=64, hidden_size=96, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, layer_types=(FULL, FULL), rope=RopeConfig(rotary_dim=16), zero_centered_norm=True,
)  # fmt: skip


def arguments(*shape: int, dtype: Any = jnp.float32) -> Any:
    """x, y and a weight of another dtype than theirs where that is bfloat16."""
    rng = np.random.default_rng(len(shape))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return normal(*shape).astype(dtype), normal(*shape).astype(dtype), normal(shape[-1])


@pytest.mark.parametrize(("shape", "offset"), [((100,), 0.0), ((3, 96), 1.0), ((2, 3, 128), 0.0), ((2, 1, 2, 5), 1.0)])
def test_the_kernel_as_the_reference_and_as_numpy(shape: tuple[int, ...], offset: float) -> None:
    args, options = arguments(*shape), {"eps": EPS, "offset": offset}
    (total, normed), want = (jax.jit(partial(f, **options))(*args) for f in (gpu.interpreted, reference.add_rms_norm))
    assert jnp.array_equal(total, want[0])
    assert_close(normed, want[1], 1e-6)
    x, y, weight = map(as_float64, args)
    mean = np.mean(np.square(x + y), axis=-1, keepdims=True)
    assert_close(normed, (x + y) / np.sqrt(mean + EPS) * (weight + offset), 1e-6)


@pytest.mark.parametrize("warps", [None, 2])
def test_half_precision_norms_the_rounded_sum(warps: int | None) -> None:
    """At most some elements are rounded the other way, and none is far off."""
    x, y, weight = arguments(4, 160, dtype=jnp.bfloat16)
    total, normed = gpu.interpreted(x, y, weight, eps=EPS, warps=warps)
    assert total.dtype == normed.dtype == jnp.bfloat16 and jnp.array_equal(total, x + y)
    want = reference.rms_norm(total.astype(jnp.float32), weight, eps=EPS).astype(jnp.bfloat16)
    assert_close(normed, want, 1e-3)


def test_the_case_by_which_it_is_proven() -> None:
    kernel, plain = (partial(f, eps=1e-6, offset=1.0) for f in (gpu.interpreted, reference.add_rms_norm))
    assert proof._verdict(kernel, plain, gpu.small_case, 1e-2) is None
    assert proof._verdict(partial(kernel, offset=0.0), plain, gpu.small_case, 1e-2) is not None


def test_passes_over_caches_take_it_and_passes_with_gradients_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window gives the same with the kernel, at every boundary; each norm but the first has an addition before it."""
    calls: list[tuple[int, ...]] = []

    def kernel(x: jax.Array, y: jax.Array, weight: jax.Array, *, eps: float, offset: float) -> Any:
        calls.append(x.shape)
        return gpu.interpreted(x, y, weight, eps=eps, offset=offset)

    target, tokens = Target(TARGET, rngs=nnx.Rngs(0)), jnp.asarray([[3, 1, 4], [1, 5, 9]])
    cache, every = target_cache(TARGET, 2, 16, 3, dtype=jnp.float32, page_size=8), range(TARGET.num_layers + 1)
    run = lambda: jax.jit(lambda cache: target.window(tokens, cache, aux_layers=every)[0])(cache)
    want = run()
    monkeypatch.setattr("pallas_kernels.norm._gpu", kernel)
    got = run()
    assert calls == [(2, 3, 96)] * 2 * TARGET.num_layers
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, 1e-6)
    jax.eval_shape(lambda: target.prefill(tokens, jnp.asarray([3, 2]), cache))
    assert len(calls) == 4 * TARGET.num_layers
    jax.eval_shape(jax.grad(lambda embeds: target(inputs_embeds=embeds).hidden.sum()), target.embed(tokens))
    with dispatch.spread():
        jax.eval_shape(lambda: target.window(tokens, cache))
    assert len(calls) == 4 * TARGET.num_layers


def test_what_the_kernel_cannot_do() -> None:
    x, y, weight = arguments(2, 3, 8)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        add_rms_norm(x, y, weight, eps=EPS, implementation="gpu")
    with pytest.raises(NotImplementedError, match=r"bfloat16\[2, 3, 8\] added to float32\[2, 3, 8\]"):
        gpu.interpreted(x, y.astype(jnp.bfloat16), weight, eps=EPS)
    with pytest.raises(NotImplementedError, match="rows of 20000; at most"):
        gpu.interpreted(*arguments(1, 20000), eps=EPS)
    with pytest.raises(NotImplementedError, match="no rows"):
        gpu.interpreted(x[:0], y[:0], weight, eps=EPS)
    with dispatch.spread():
        spread = add_rms_norm(x, y, weight, eps=EPS)
    assert "not for a mesh" in dispatch.fallbacks()["norm.add_rms_norm"]
    total, normed = add_rms_norm(x, y, weight, eps=EPS)
    assert "for GPUs" in dispatch.fallbacks()["norm.add_rms_norm"]
    assert jnp.array_equal(total, x + y) and jnp.array_equal(normed, spread[1])
    assert jnp.array_equal(normed, reference.rms_norm(x + y, weight, eps=EPS))
