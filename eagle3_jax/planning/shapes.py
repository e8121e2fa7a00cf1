"""Models as shapes with a place on a mesh: enough to count and to compile, without a weight."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.typing import DTypeLike

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.meshes import MeshShape
from eagle3_jax.sharding import AXES, model_shardings
from eagle3_jax.target import Target


def abstract_mesh(shape: MeshShape) -> Any:
    """A mesh of no devices, for counting; typed as any mesh, since shardings take either."""
    sizes = dataclasses.astuple(shape)
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@functools.lru_cache(maxsize=8)
def _split(config: TargetConfig | DraftConfig, dtype: jnp.dtype) -> tuple[Any, Any]:
    make: Callable[..., Any] = Target if isinstance(config, TargetConfig) else Eagle3
    graph, state = nnx.split(nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0))))
    return graph, state


def abstract_model(config: TargetConfig | DraftConfig, dtype: DTypeLike, mesh: Mesh) -> tuple[Any, Any]:
    """(graph, nnx state) of a model whose arrays are shapes with shardings."""
    graph, state = _split(config, jnp.dtype(dtype))
    return graph, placed(state, model_shardings(state, mesh, config))


def placed(tree: Any, shardings: Any) -> Any:
    """Shapes of a tree's arrays, each with its sharding."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)


def elements(x: Any) -> int:
    """Of an array or shape, on one device."""
    return math.prod(x.sharding.shard_shape(x.shape))


def held(tree: Any) -> float:
    """Bytes of a tree on one device."""
    return math.fsum(elements(x) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def named(state: Any) -> Iterable[tuple[str, Any]]:
    """(path, shape) of a model's arrays."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        yield ".".join(name for name in names if name != "value"), x
