"""What a batch of sequences has seen: keys and values, delta-rule states, and the window that awaits its verdict.

Plain registered dataclasses, given to a jitted step and returned. A slot is one sequence's place in the batch.
Letters: B slots, W window, K key/value heads, H head width, Hk/Hv key/value heads of the delta rule, M/P their widths.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.config import DELTA, DraftConfig, TargetConfig


class _Replace:
    def replace(self, **changes: Any) -> Any:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages(_Replace):
    """Keys and values of one attention layer. Rejected tokens are simply overwritten: lengths say what counts."""

    keys: Array  # [K, num_pages, page_size, H]
    values: Array  # [K, num_pages, page_size, H]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState(_Replace):
    """One delta-rule layer: the committed state, and the small vectors from which accepted tokens are folded in later.

    Rejected tokens cannot be subtracted from a recurrent state, so the state never sees a token before it is accepted.
    """

    state: Array  # [B,Hv,M,P] float32, committed
    keys: Array  # [B,W,Hk,M] float32, of the last window
    updates: Array  # [B,W,Hv,P] float32, of the last window
    log_decay: Array  # [B,W,Hv] float32, of each token of the last window
    inputs: Array  # [B,kernel-1+W,channels] convolution inputs: committed tail, then the last window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache(_Replace):
    """A target's (or a drafter's) memory of B slots.

    `lengths` counts committed tokens. Of these the last `pending` are not yet in the recurrent states: the next pass
    folds them in. `page_table` maps a slot's pages to the pools; while it is the identity, `contiguous` says so, and
    attention reads the pools where they lie.
    """

    layers: tuple[KVPages | DeltaState, ...]
    page_table: Array  # [B, pages_per_slot] int32
    lengths: Array  # [B] int32
    pending: Array  # [B] int32, <= W
    contiguous: bool = dataclasses.field(default=False, metadata={"static": True})

    def commit(self, accepted: Array) -> Cache:
        """Accepts the first `accepted` [B] tokens of the window just passed; the others never happened."""
        return self.replace(lengths=self.lengths + accepted, pending=accepted)

    def with_page_table(self, page_table: Array) -> Cache:
        """The same pools under another table, [B, pages_per_slot] int32, which need not be the identity."""
        return self.replace(page_table=page_table, contiguous=False)

    def take(self, slots: Array) -> Cache:
        """The cache of some `slots` [n] int32 alone; pools stay whole, and their pages are found by the table."""
        rows = lambda x: jnp.take(x, slots, axis=0, mode="clip")
        layers = (jax.tree.map(rows, layer) if isinstance(layer, DeltaState) else layer for layer in self.layers)
        return Cache(tuple(layers), rows(self.page_table), rows(self.lengths), rows(self.pending))

    def put(self, slots: Array, part: Cache) -> Cache:
        """Puts what `take` gave back in its place; slots that do not exist are dropped."""
        rows = lambda old, new: old.at[slots].set(new, mode="drop")
        layers = (
            jax.tree.map(rows, old, new) if isinstance(old, DeltaState) else new
            for old, new in zip(self.layers, part.layers, strict=True)
        )
        return self.replace(
            layers=tuple(layers), lengths=rows(self.lengths, part.lengths), pending=rows(self.pending, part.pending)
        )

    def reset(self, slots: Array) -> Cache:
        """Empties the slots where `slots` [B] is True.

        Keys and values too, though none of them counts any more: a NaN would pass through a weight of zero, and the
        slot's next sequence would suffer for its last.
        """

        def clear(layer: KVPages | DeltaState) -> KVPages | DeltaState:
            if isinstance(layer, DeltaState):
                return jax.tree.map(lambda x: _zero_rows(x, slots), layer)
            pages = jnp.where(slots[:, None], self.page_table, layer.keys.shape[1])  # out of range, hence dropped
            return jax.tree.map(lambda x: x.at[:, pages].set(0, mode="drop"), layer)

        zero = jnp.zeros_like(self.lengths)
        return self.replace(
            layers=tuple(clear(layer) for layer in self.layers),
            lengths=jnp.where(slots, zero, self.lengths),
            pending=jnp.where(slots, zero, self.pending),
        )


def _zero_rows(x: Array, rows: Array) -> Array:
    return jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), jnp.zeros_like(x), x)


def target_cache(
    config: TargetConfig, slots: int, max_length: int, window: int, *, dtype: DTypeLike, page_size: int = 64
) -> Cache:
    """An empty cache for `slots` sequences of up to `max_length` tokens, verified `window` tokens at a time."""

    def layer(kind: str) -> KVPages | DeltaState:
        if kind == DELTA:
            return _delta_state(config, slots, window, dtype)
        return _pages(slots, max_length, page_size, config.num_kv_heads, config.head_dim, dtype)

    return _empty(tuple(layer(kind) for kind in config.layer_types), slots, max_length, page_size)


def draft_cache(config: DraftConfig, slots: int, max_length: int, *, dtype: DTypeLike, page_size: int = 64) -> Cache:
    """An empty cache for the layers of an EAGLE-3 head; `pending` stays 0, since it has no recurrent state."""
    pages = [
        _pages(slots, max_length, page_size, config.num_kv_heads, config.head_dim, dtype)
        for _ in range(config.num_layers)
    ]
    return _empty(tuple(pages), slots, max_length, page_size)


def _empty(layers: tuple[KVPages | DeltaState, ...], slots: int, max_length: int, page_size: int) -> Cache:
    per_slot = -(-max_length // page_size)
    table = jnp.arange(slots * per_slot, dtype=jnp.int32).reshape(slots, per_slot)
    zeros = jnp.zeros((slots,), jnp.int32)
    return Cache(layers, table, zeros, zeros, contiguous=True)


def _pages(slots: int, max_length: int, page_size: int, heads: int, width: int, dtype: DTypeLike) -> KVPages:
    shape = (heads, slots * -(-max_length // page_size), page_size, width)
    return KVPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _delta_state(config: TargetConfig, slots: int, window: int, dtype: DTypeLike) -> DeltaState:
    c, zeros = config, jnp.zeros
    return DeltaState(
        state=zeros((slots, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim), jnp.float32),
        keys=zeros((slots, window, c.linear_num_key_heads, c.linear_key_head_dim), jnp.float32),
        updates=zeros((slots, window, c.linear_num_value_heads, c.linear_value_head_dim), jnp.float32),
        log_decay=zeros((slots, window, c.linear_num_value_heads), jnp.float32),
        inputs=zeros((slots, c.linear_conv_kernel_dim - 1 + window, c.linear_conv_dim), dtype),
    )
