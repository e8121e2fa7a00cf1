"""Which arithmetic a dtype asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from eagle3_jax.errors import ConfigError

ALWAYS_FLOAT32 = ("A_log", "dt_bias")
_NAMES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def parse_dtype(name: DTypeLike | str) -> Any:
    """float32 or bfloat16, by name or as a dtype; anything else is refused by name."""
    key = name if isinstance(name, str) else jnp.dtype(name).name
    if key not in _NAMES:
        raise ConfigError(f"dtype {key!r} is not supported; choose one of auto, {', '.join(_NAMES)}")
    return _NAMES[key]


def matmul_precision(dtype: DTypeLike) -> contextlib.AbstractContextManager[Any]:
    """A context to trace under: float32 means HIGHEST in every product (default: TF32 on H200, bf16 on TPU)."""
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


def cast_for_compute(state: Any, dtype: DTypeLike) -> Any:
    """Floating parameters of an nnx state in `dtype`, but for those that stay float32 whatever the model's dtype."""

    def cast(path: tuple[Any, ...], value: Any) -> Any:
        names = {str(getattr(k, "key", getattr(k, "name", k))) for k in path}
        keep = names & set(ALWAYS_FLOAT32) or not jnp.issubdtype(value.dtype, jnp.floating)
        return value if keep else value.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, state)


def split(model: nnx.Module) -> tuple[Any, list[jax.Array], Any]:
    """(graph definition, leaves, tree definition): what a jitted function takes instead of a module.

    Calling `nnx.jit` with a large model costs tens of milliseconds of host time a call; flat leaves cost 0.15.
    """
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return graph, leaves, tree


def join(graph: Any, tree: Any, leaves: Sequence[jax.Array]) -> Any:
    """The module again, inside the jitted function: the inverse of `split`."""
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))
