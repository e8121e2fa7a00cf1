"""Calls that each device of a mesh makes for its own part: where kernels, which know no mesh, can run.

What is cut is what caches are cut by, slots and heads (`eagle3_jax.sharding`); what a device needs lies there already,
so that nothing moves but activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from eagle3_jax.sharding import MESH_AXES, current_layout, parts
from pallas_kernels import dispatch

Axes = tuple[str, ...]


def per_device(function: Callable[..., Any], args: tuple[Any, ...], inputs: tuple[Axes, ...], outputs: Any) -> Any:
    """`function(*args)`, on a mesh with each device's parts of them.

    inputs: logical axes of each of `args` (and of all arrays in it); outputs: the same of what is returned, a tree.
    Sizes must divide: see `divides`. Without a layout, or on one device, it is just the call.
    """
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return function(*args)

    def local(*own: Any) -> Any:
        with dispatch.whole():
            return function(*own)

    specs = [jax.tree.map(lambda _, axes=axes: _spec(axes), arg) for axes, arg in zip(inputs, args, strict=True)]
    is_axes = lambda x: isinstance(x, tuple) and all(isinstance(axis, str) for axis in x)
    found = jax.tree.map(_spec, outputs, is_leaf=is_axes)
    return jax.shard_map(local, mesh=layout.mesh, in_specs=tuple(specs), out_specs=found, check_vma=False)(*args)


def divides(axis: str, *sizes: int) -> bool:
    """Whether a logical axis cuts all of these sizes into equal parts; without a layout it cuts nothing."""
    layout = current_layout()
    return layout is None or all(size % parts(axis, layout.mesh) == 0 for size in sizes)


def _spec(axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(MESH_AXES[axis] for axis in axes))
