"""Where the optimizer's state lies: with the parameters that it is about."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from eagle3_jax.sharding import replicated


def optimizer_shardings(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """A sharding for every array of the optimizer's state: moments lie where their parameters do, counters everywhere.

    params: arrays, or shapes, that have a sharding. Zeros made under `jit` without this end up whole on every device.
    """
    state = jax.eval_shape(optimizer.init, params)
    places = jax.tree.map(lambda x: x.sharding, params)
    return optax.tree_map_params(
        optimizer, lambda _, place: place, state, places, transform_non_params=lambda _: replicated(mesh)
    )
