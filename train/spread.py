"""Work on tokens that needs nothing of other tokens, done by every device of a mesh on its own part of them.

Rows of a batch lie over `data` and `fsdp`; on the devices along `expert` and `tensor` they are whole, and there the
tokens of a row are shared out. Left to itself, XLA would divide a product's vocabulary instead, gather matrices anew
for each chunk of tokens, and sum a gradient for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from eagle3_jax.sharding import Layout, current_layout

SHARING = ("expert", "tensor")
"""Axes on which rows are whole."""


def over_tokens(
    function: Callable[..., Any], whole: Any, arrays: Sequence[tuple[Array, int]], out: int | None = None
) -> Any:
    """`function(whole, *arrays)` of arrays [..., B, T, ...], each given with its axis T; under a layout, of a device's
    part of each.

    whole: what every token needs, gathered once; its gradients are summed once. out: the axis T of the results
    [..., B, T]. None: they are sums over rows and tokens.
    """
    layout, values = current_layout(), [x for x, _ in arrays]
    if layout is None:
        return function(whole, *values)
    first, axis = arrays[0]
    rows, tokens = layout.row_axes(first.shape[axis - 1]), _token_axes(layout, first.shape[axis])

    def spec(axis: int, tokens: tuple[str, ...] = tokens) -> PartitionSpec:
        return PartitionSpec(*(None,) * (axis - 1), rows or None, tokens or None)

    # Before this, tokens are not shared out: or XLA would do so to all that made these arrays.
    values = [jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec(axis, ()))) for x, axis in arrays]

    def local(whole: Any, *parts: Array) -> Any:
        found = function(whole, *parts)
        return found if out is not None else jax.tree.map(lambda x: jax.lax.psum(x, (*rows, *tokens)), found)

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=(PartitionSpec(), *(spec(axis) for _, axis in arrays)),
        out_specs=PartitionSpec() if out is None else spec(out), check_vma=False,
    )(whole, *values)  # fmt: skip


def _token_axes(layout: Layout, length: int) -> tuple[str, ...]:
    """The axes over which so many tokens are shared out: all, or those that divide them."""
    ways = (SHARING, SHARING[1:], SHARING[:1])
    return next((way for way in ways if length % math.prod(layout.mesh.shape[axis] for axis in way) == 0), ())
