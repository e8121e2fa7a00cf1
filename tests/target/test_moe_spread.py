"""Experts over devices: the same sums as on one, whatever the router prefers, and no expert gathered."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.config import TargetConfig
from eagle3_jax.layers.moe import MoE
from eagle3_jax.meshes import parse_mesh
from eagle3_jax.sharding import laid_out, model_shardings
from tests.helpers import assert_close
from tests.target import oracle

CONFIG = TargetConfig.from_hf({**oracle.QWEN3_5_MOE, "num_experts": 8, "num_experts_per_tok": 2})
X = np.random.default_rng(0).standard_normal((4, 6, CONFIG.hidden_size)).astype(np.float32)
PREFERENCES = {"balanced": 0.0, "unbalanced": 3.0, "two experts take all": 100.0}


def layer(preference: float) -> MoE:
    """A layer whose router prefers the last two experts, which one device holds, by that much."""
    model = MoE(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    # Every token has a component along this direction, to which only the last two experts answer.
    direction = jnp.zeros((CONFIG.hidden_size, CONFIG.num_experts)).at[0, -2:].set(preference)
    model.gate.kernel[...] = model.gate.kernel[...] + direction
    return model


@pytest.mark.parametrize("preference", PREFERENCES)
@pytest.mark.parametrize("name", ["ep4 tp2", "dp2 ep4", "fsdp2 ep2 tp2", "fsdp4"])
def test_no_token_is_dropped(name: str, preference: str) -> None:
    model, x = layer(PREFERENCES[preference]), X.copy()
    x[..., 0] = 1.0
    mesh = parse_mesh(name).mesh()
    graph, state = nnx.split(model)
    spread = jax.device_put(state, model_shardings(state, mesh, CONFIG))
    whole = jax.jit(lambda state, x: nnx.merge(graph, state)(x))

    def on_mesh(state: nnx.State, x: jax.Array) -> jax.Array:
        with laid_out(mesh, "batch"):
            return nnx.merge(graph, state)(x)

    compiled = jax.jit(on_mesh).lower(spread, jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()
    assert_close(compiled(spread, x), whole(state, x), 1e-6)
    counts = np.bincount(np.asarray(model._route(x.reshape(-1, x.shape[-1]), model.gate.kernel[...])[1]).reshape(-1))
    assert (counts[-2:].sum() == counts.sum()) == (preference == "two experts take all")
    if "ep" in name:
        gathered = re.findall(r"\[(\d+),[\d,]+\]\S* all-gather", compiled.as_text())
        assert str(CONFIG.num_experts) not in gathered, "experts of other devices are gathered"
