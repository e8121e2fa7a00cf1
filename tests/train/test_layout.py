"""The optimizer's moments lie with their parameters; so does everything a step changes, before and after it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle3_jax.meshes import parse_mesh
from eagle3_jax.sharding import param_sharding
from train.layout import optimizer_shardings
from train.optim import make_optimizer
from train.recipe import OptimizerRecipe

NAMES = {"layers.0.mlp.down_proj.kernel": (32, 16), "lm_head.kernel": (16, 64), "norm.weight": (16,)}


def test_moments_lie_with_their_parameters() -> None:
    mesh, optimizer = parse_mesh("fsdp2 tp4").mesh(), make_optimizer(OptimizerRecipe(), 10)
    place = {name: param_sharding(name.split("."), shape, mesh) for name, shape in NAMES.items()}
    params = {name: jax.device_put(jnp.ones(shape), place[name]) for name, shape in NAMES.items()}
    where = optimizer_shardings(optimizer, params, mesh)
    state = jax.jit(optimizer.init, out_shardings=where)(params)
    moments = [x for x in jax.tree_util.tree_leaves_with_path(state) if x[1].ndim]
    assert len(moments) == 2 * len(NAMES)
    for path, x in moments:
        name = path[-1].key
        assert x.sharding.is_equivalent_to(place[name], x.ndim) and x.shape == NAMES[name]
    counters = [x for x in jax.tree.leaves(state) if not x.ndim]
    assert counters and all(x.sharding.is_fully_replicated for x in counters)
    assert moments[0][1].addressable_shards[0].data.shape == (8, 8)
