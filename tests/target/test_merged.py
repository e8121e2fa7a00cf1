"""Projections side by side give what they give apart, in fewer products, whatever format their weights have."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.cache import target_cache
from eagle3_jax.quantization import find_quantization, quantize_model
from eagle3_jax.target import Target
from tests.helpers import assert_close
from tests.infer import tiny


def products(model: Target, tokens: jax.Array) -> int:
    return str(jax.make_jaxpr(lambda t: model(t).hidden)(tokens)).count(" dot_general[")


@nnx.jit
def cached(model: Target, tokens: jax.Array) -> list[jax.Array]:
    """Hidden states of a prefill of three tokens and of two windows of two, of which one token is accepted."""
    cache = target_cache(model.config, len(tokens), 16, 2, dtype=jnp.float32)
    out, cache = model.prefill(tokens[:, :3], jnp.full(len(tokens), 3), cache)
    found = [out.hidden]
    for start in (3, 4):
        out, cache = model.window(tokens[:, start : start + 2], cache)
        found, cache = [*found, out.hidden], cache.commit(jnp.ones(len(tokens), jnp.int32))
    return found


@pytest.mark.parametrize(
    ("family", "quantization", "fewer"),
    [("qwen3_5", None, 7), ("qwen3_5", "int8", 6), ("qwen3_5_moe", None, 7), ("qwen2", None, 6)],
)
def test_merged_projections_equal_those_apart(family: str, quantization: str | None, fewer: int) -> None:
    model = tiny.target(family)
    if quantization is not None:
        quantize_model(model, find_quantization(quantization))
    merged = copy.deepcopy(model).merge_projections()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 7)), jnp.int32)
    assert_close(merged(tokens).hidden, model(tokens).hidden, 2e-6)
    if family == "qwen3_5":
        for got, want in zip(cached(merged, tokens), cached(model, tokens), strict=True):
            assert_close(got, want, 2e-6)
    assert products(model, tokens) - products(merged, tokens) == fewer


def test_what_was_merged_is_let_go() -> None:
    model = tiny.target("qwen3_5")
    before = sum(x.size for x in jax.tree.leaves(model))
    model.merge_projections()
    assert sum(x.size for x in jax.tree.leaves(model)) == before
    assert model.layers[0].linear_attn.in_proj_qkv is None and model.layers[1].self_attn.q_proj is None
