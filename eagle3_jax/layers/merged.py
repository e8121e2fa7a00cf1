"""Projections of one input side by side in one matrix, as vLLM's merged column-parallel linears.

At batch 1 a product takes a few microseconds beyond the time of reading its matrix, whatever its size: one for the
delta rule's qkv, z, b and a, one for q, k and v, one for gate and up. For running alone: checkpoints, training and
meshes, whose devices each hold a part of every projection, keep the projections apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle3_jax.layers.linear import Linear


class Part(NamedTuple):
    """One map's output: the `width` columns of `whole` [..., W] from `start` on."""

    whole: Array
    start: int
    width: int

    def cut(self) -> Array:
        """By itself, which costs a kernel where what follows is a kernel of our own."""
        return self.whole[..., self.start : self.start + self.width]


class MergedLinear(nnx.Module):
    """Linear maps of one input, in as few products as their formats allow: those in one byte apart from the others."""

    def __init__(self, maps: Sequence[Linear]) -> None:
        groups = [list(group) for _, group in itertools.groupby(maps, _format)]
        self.parts = nnx.List([_side_by_side(group) for group in groups])
        self.widths = tuple(tuple(one.kernel.shape[-1] for one in group) for group in groups)

    def __call__(self, x: Array) -> list[Part]:
        """The outputs of each map, side by side as the products leave them."""
        found = []
        for product, widths in zip(self.parts, self.widths, strict=True):
            starts = itertools.accumulate(widths, initial=0)
            whole = product(x)
            found += [Part(whole, start, width) for start, width in zip(starts, widths, strict=False)]
        return found


def project_parts(x: Array, merged: MergedLinear | None, *maps: Linear | None) -> list[Part]:
    """x through every map, which are gone once they are `merged`."""
    if merged is not None:
        return merged(x)
    return [Part(y, 0, y.shape[-1]) for y in (one(x) for one in maps if one is not None)]


def project(x: Array, merged: MergedLinear | None, *maps: Linear | None) -> list[Array]:
    """The same, each by itself."""
    return [part.cut() for part in project_parts(x, merged, *maps)]


def merge(owner: Any, name: str, maps: Sequence[str]) -> None:
    """Puts the layer's projections `maps` together as its attribute `name`, and lets go of them."""
    setattr(owner, name, nnx.data(MergedLinear([getattr(owner, each) for each in maps])))
    for each in maps:
        setattr(owner, each, None)


def _format(one: Linear) -> tuple[Any, ...]:
    return one.kernel.dtype, one.block, one.kernel_scale is None, one.bias is None


def _side_by_side(maps: Sequence[Linear]) -> Linear:
    if len(maps) == 1:
        return maps[0]
    has_bias = maps[0].bias is not None
    joined: Linear = nnx.eval_shape(lambda: Linear(1, 1, bias=has_bias, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    for name in ("kernel", "kernel_scale", "bias"):
        if getattr(maps[0], name) is not None:
            whole = jnp.concatenate([getattr(one, name)[...] for one in maps], axis=-1)
            setattr(joined, name, nnx.data(nnx.Param(whole)))
    joined.block = maps[0].block
    return joined
