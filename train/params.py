"""Which of a drafter's arrays are trained, and the drafter made of them again inside a jitted function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.drafters.eagle3 import Eagle3

HEAD = ("norm.", "lm_head.")

Params = dict[str, Array]
"""Path, as in `layers.0.self_attn.q_proj.kernel`, to array."""


def is_trained(path: tuple[Any, ...], value: Any) -> bool:
    """All parameters but the token embedding, which stays the target's. The table `d2t` is no parameter."""
    return isinstance(value, nnx.Param) and path[0] != "embed_tokens"


@dataclasses.dataclass(frozen=True)
class DraftGraph:
    """The structure of a drafter without its arrays: what a jitted function may close over."""

    graph: Any
    trained: Any
    fixed: Any
    names: tuple[str, ...]

    def merge(self, params: Mapping[str, Array], fixed: list[Array], dtype: DTypeLike) -> Eagle3:
        """The drafter, its trained parameters cast to `dtype`.

        Merged anew at every use: the casts fuse, and gradients of the uses are summed in the parameters' float32.
        """
        return self._merge({name: x.astype(dtype) for name, x in params.items()}, fixed)

    def merge_head(self, params: Mapping[str, Array], fixed: list[Array], dtype: DTypeLike) -> Eagle3:
        """As `merge`, for `norm` and `logits` alone, of what `head` gives; the rest of it has no arrays."""
        used = {name: x.astype(dtype) for name, x in self.head(params).items()}
        return self._merge({**dict.fromkeys(self.names), **used}, fixed)

    def head(self, params: Mapping[str, Array]) -> Params:
        """Of the parameters, those of the final norm and the output projection."""
        return {name: x for name, x in params.items() if name.startswith(HEAD)}

    def _merge(self, params: Mapping[str, Any], fixed: list[Array]) -> Eagle3:
        trained = jax.tree.unflatten(self.trained, [params[name] for name in self.names])
        return nnx.merge(self.graph, trained, jax.tree.unflatten(self.fixed, fixed))


def split_drafter(drafter: Eagle3) -> tuple[DraftGraph, Params, list[Array]]:
    """(graph, float32 parameters by name, arrays that are not trained).

    The parameters are copies: a training step donates them, and what they were made of may be the target's.
    """
    parts: tuple[Any, ...] = nnx.split(drafter, is_trained, ...)
    graph, trained, fixed = parts
    paths = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(trained))
    names = tuple(".".join(str(getattr(key, "key", key)) for key in path) for path, _ in paths)
    leaves, tree = jax.tree.flatten(trained)
    fixed_leaves, fixed_tree = jax.tree.flatten(fixed)
    params = {name: jnp.array(leaf, jnp.float32, copy=True) for name, leaf in zip(names, leaves, strict=True)}
    return DraftGraph(graph, tree, fixed_tree, names), params, fixed_leaves
