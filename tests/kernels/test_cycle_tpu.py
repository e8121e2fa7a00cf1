"""A whole target on its TPU kernels: the same hidden states by interpretation, and one loop without copied caches."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from benchmarks.tpu_kernels import Case, compile_for
from eagle3_jax.cache import Cache, target_cache
from eagle3_jax.config import DELTA, FULL, RopeConfig, TargetConfig
from eagle3_jax.target import Target
from pallas_kernels import dispatch
from tests.helpers import assert_close
from tests.kernels.on_tpu import copies

CONFIG = TargetConfig(
    model_type="qwen3_5", vocab_size=256, hidden_size=128, intermediate_size=128, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=128, layer_types=(DELTA, FULL), rope=RopeConfig(rotary_dim=32, mrope_section=(6, 5, 5)),
    qk_norm=True, attn_output_gate=True, zero_centered_norm=True, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip


def windows(target: Target, tokens: jax.Array) -> tuple[Cache, jax.Array]:
    """Hidden states of windows [n,B,W] from an empty cache; of each, one slot accepts a token and the other all."""

    def cycle(cache: Cache, window: jax.Array) -> tuple[Cache, jax.Array]:
        out, cache = target.window(window, cache)
        return cache.commit(jnp.asarray([1, 3])), out.hidden

    cache = target_cache(CONFIG, 2, 16, 3, dtype=jnp.float32, page_size=8)
    return jax.lax.scan(cycle, cache, tokens)


def test_a_target_on_kernels_gives_the_same_hidden_states() -> None:
    graph, state = nnx.split(Target(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 2, 3)), jnp.int32)
    run = lambda: jax.jit(lambda state: windows(nnx.merge(graph, state), tokens))(state)
    want = run()
    with dispatch.using("tpu"), pltpu.force_tpu_interpret_mode():
        got = jax.block_until_ready(run())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, 1e-5)


def test_a_loop_calls_kernels_and_copies_no_cache() -> None:
    """And so the layout that one kernel writes is the one that the other reads."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Target(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    cache: Cache = jax.eval_shape(lambda: target_cache(CONFIG, 4, 1024, 4, dtype=jnp.bfloat16))

    def cycles(state: Any, cache: Cache, tokens: jax.Array) -> Cache:
        def cycle(_: jax.Array, cache: Cache) -> Cache:
            out, cache = nnx.merge(graph, state).window(tokens, cache)
            return cache.commit((out.hidden[:, :, 0] > 0).sum(1, dtype=jnp.int32))

        return jax.lax.fori_loop(0, 8, cycle, cache)

    tokens = jax.ShapeDtypeStruct((4, 4), jnp.int32)
    with dispatch.using("tpu"):
        compiled = compile_for(Case(cycles, (state, cache, tokens), (1,), None), "v5e")
    called = re.findall(r"%(gated_delta_step|write_pages|paged_attention)[.\d]* = ", compiled.as_text())
    assert sorted(called) == ["gated_delta_step", "paged_attention", "write_pages", "write_pages"]
    delta, pages = cache.layers
    for array in (delta.state, pages.keys):  # type: ignore[union-attr]
        assert not copies(compiled, array)
