"""What one measurement is: an operation at a shape, every way of doing it, and what it should give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from eagle3_jax.config import TargetConfig

KERNEL = "tpu" if jax.default_backend() == "tpu" else "gpu"
OURS = ("reference", "tpu") if KERNEL == "tpu" else ("reference",)
"""Ways of what has no kernel for GPUs."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a target and its head; as they stand here, of Qwen3.5-9B. No key heads: a target without the delta rule."""

    key_heads: int = 16
    value_heads: int = 32
    key_width: int = 128
    value_width: int = 128
    taps: int = 4
    heads: int = 16
    kv_heads: int = 4
    width: int = 256
    vocab: int = 248_320
    hidden: int = 4096
    draft_vocab: int = 32_000

    @classmethod
    def of(cls, c: TargetConfig) -> Sizes:
        delta = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        attends = c.num_heads, c.num_kv_heads, c.head_dim
        drafted = min(32_000, c.vocab_size)
        return cls(*delta, c.linear_conv_kernel_dim, *attends, c.vocab_size, c.hidden_size, drafted)

    @property
    def draft_heads(self) -> tuple[int, int]:
        """Query and key heads of a head as `benchmarks.models.head_config` makes it; they are 128 wide."""
        heads = max(self.hidden // 128, 1)
        return heads, max(heads // 4, 1)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Batches, windows, contexts and rows to measure at. `steps`: whose keys a branch holds."""

    state_batches: tuple[int, ...] = (1, 8, 32, 64)
    attention_batches: tuple[int, ...] = (1, 8, 64)
    windows: tuple[int, ...] = (1, 4, 8)
    contexts: tuple[int, ...] = (128, 8192)
    verify_batches: tuple[int, ...] = (1, 64)
    steps: tuple[int, ...] = (1, 4, 7)
    rows: int = 4
    length: int = 4096
    prompt: int = 2048


TINY = Grid((1, 2), (2,), (1, 3), (64, 128), (2,), (1, 3), 2, 64, 32)


class Way(NamedTuple):
    """`run` takes the case's arguments, or what `prepare` makes of them beforehand."""

    run: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table for each way. `make` gives the arguments from a key.

    exact: gives the right result of arguments that were cast to float32. floor: does the least that could be done with
    the same arguments. in_place: the first argument is donated, and the last result takes its place in the next call.
    bytes, flops: of one call, each thing read or written once.
    """

    operation: str
    shape: str
    make: Callable[[Array], tuple[Any, ...]]
    ways: dict[str, Way]
    exact: Callable[..., Any]
    floor: Callable[..., Any] | None = None
    in_place: bool = False
    bytes: int = 0
    flops: int = 0


def implementations(function: Callable[..., Any], *names: str) -> dict[str, Way]:
    return {name: Way(partial(function, implementation=name)) for name in names}


class Draw:
    """Random arrays, each from a key of its own."""

    def __init__(self, key: Array) -> None:
        self.key, self.count = key, 0

    def normal(self, *shape: int, dtype: Any = jnp.float32) -> Array:
        self.count += 1
        return jax.random.normal(jax.random.fold_in(self.key, self.count), shape, jnp.float32).astype(dtype)

    def half(self, *shape: int) -> Array:
        return self.normal(*shape, dtype=jnp.bfloat16)

    def unit(self, *shape: int) -> Array:
        x = self.normal(*shape)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def uniform(self, *shape: int) -> Array:
        return jax.nn.sigmoid(self.normal(*shape))
