"""How the rows of a batch sample, and how what no row asks for is skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Result = TypeVar("Result")
Feature = Literal["temperature", "min_p", "top_k", "top_p", "min_tokens"]
Asks = frozenset[Feature] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How each of the B rows of a batch samples. Greedy rows (temperature 0) ignore the filters and draw nothing.

    `no_stop` says where a stop id may not be sampled (yet). `asks`, part of the compiled program, names all that any
    row asks for; None where that is not known, and then the device decides. The result is the same.
    """

    temperature: Array  # [B] float32
    min_p: Array  # [B] float32, 0 = off
    top_k: Array  # [B] int32, 0 or less = off
    top_p: Array  # [B] float32, 1 = off
    stop_ids: Array  # [B,n] int32, padded with -1
    no_stop: Array  # [B,W] bool
    asks: Asks = field(default=None, metadata={"static": True})

    @property
    def sampled(self) -> Array:
        """[B] bool: rows that draw, rather than take the most likely token."""
        return self.temperature > 0

    @property
    def filters(self) -> tuple[Array, Array, Array]:
        """min_p, top_k and top_p [B], each 0 where it is off."""
        min_p, top_k = jnp.where(self.sampled, self.min_p, 0.0), jnp.where(self.sampled, self.top_k, 0)
        return min_p, jnp.maximum(top_k, 0), jnp.where(self.sampled & (self.top_p < 1), self.top_p, 0.0)


def if_asked(
    sampling: Sampling, feature: Feature, rows: Array, do: Callable[..., Result], leave: Callable[..., Result],
    *args: Array,
) -> Result:  # fmt: skip
    """`do` if any of the rows asks for a feature, else `leave`."""
    if sampling.asks is None:
        return lax.cond(rows.any(), do, leave, *args)
    return do(*args) if feature in sampling.asks else leave(*args)
