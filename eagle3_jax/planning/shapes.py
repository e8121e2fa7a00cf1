"""Models as shapes with a place on a mesh: enough to count and to compile, without a weight."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
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
from eagle3_jax.quantization import SCALE, find_quantization, quantize_model
from eagle3_jax.sharding import AXES, model_shardings, param_sharding
from eagle3_jax.target import Target


def abstract_mesh(shape: MeshShape) -> Any:
    """A mesh of no devices, for counting; typed as any mesh, since shardings take either."""
    sizes = dataclasses.astuple(shape)
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@functools.lru_cache(maxsize=8)
def _split(config: TargetConfig | DraftConfig, dtype: jnp.dtype, quantization: str | None) -> tuple[Any, Any]:
    def make() -> Any:
        kind: Callable[..., Any] = Target if isinstance(config, TargetConfig) else Eagle3
        model = kind(config, dtype=dtype, rngs=nnx.Rngs(0))
        return model if quantization is None else quantize_model(model, find_quantization(quantization))

    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, state


def abstract_model(
    config: TargetConfig | DraftConfig, dtype: DTypeLike, mesh: Mesh, quantization: str | None = None
) -> tuple[Any, Any]:
    """(graph, nnx state) of a model whose arrays are shapes with shardings."""
    graph, state = _split(config, jnp.dtype(dtype), quantization)
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


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of so many layers, each of which has `elements` of it on one device; scales have none that count."""

    name: str
    elements: int
    bytes: int
    times: int


class Weights(tuple[Weight, ...]):
    """Of a model, counted."""

    @property
    def elements(self) -> float:
        return math.fsum(w.elements * w.times for w in self)

    @property
    def bytes(self) -> float:
        return math.fsum(w.bytes * w.times for w in self)

    def named(self, pattern: str) -> Weights:
        return Weights(w for w in self if re.search(pattern, w.name))

    def other(self, pattern: str) -> Weights:
        return Weights(w for w in self if not re.search(pattern, w.name))


def count_weights(
    config: TargetConfig | DraftConfig, dtype: DTypeLike, mesh: Any, quantization: str | None = None
) -> Weights:
    """A model's arrays on one device of a mesh. Of layers that are alike, and there may be a hundred, one is seen."""
    short, times = shortened(config) if isinstance(config, TargetConfig) else (config, ())
    found = []
    for name, x in _arrays(short, jnp.dtype(dtype), quantization):
        path = name.split(".")
        shard = param_sharding(path, x.shape, mesh, config).shard_shape(x.shape)
        number = times[int(path[1])] if path[0] == "layers" and times else 1
        elements = 0 if name.endswith(SCALE) else math.prod(shard)
        found.append(Weight(name, elements, _tiled(shard, x.dtype.itemsize) * x.dtype.itemsize, number))
    return Weights(found)


def _tiled(shape: tuple[int, ...], itemsize: int) -> int:
    """Elements as a TPU lays them out, in tiles of 8 x 128 words: slivers of a matrix take as much room as tiles, which
    are lower for an array of few rows. The compiler turns a matrix on its side where that takes less."""
    if len(shape) < 2:
        return math.prod(shape)

    def area(rows: int, columns: int) -> int:
        height = min(32 // itemsize, 1 << (rows - 1).bit_length())
        return -(-rows // height) * height * -(-columns // 128) * 128

    return math.prod(shape[:-2]) * min(area(*shape[-2:]), area(*shape[:-3:-1]))


@functools.lru_cache(maxsize=32)
def _arrays(
    config: TargetConfig | DraftConfig, dtype: jnp.dtype, quantization: str | None
) -> tuple[tuple[str, Any], ...]:
    return tuple(named(_split(config, dtype, quantization)[1]))


@functools.lru_cache(maxsize=32)
def shortened(config: TargetConfig) -> tuple[TargetConfig, tuple[int, ...]]:
    """The same model with one layer of each kind, and how many there are of each."""
    kinds = Counter(zip(config.layer_types, config.moe_layers or (False,) * config.num_layers, strict=True))
    types, mixtures = zip(*kinds, strict=True)
    moe = mixtures if config.moe_layers else ()
    short = dataclasses.replace(config, num_layers=len(kinds), layer_types=types, moe_layers=moe)
    return short, tuple(kinds.values())
