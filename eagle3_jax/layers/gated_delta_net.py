"""The gated delta-rule layer of Qwen3-Next and Qwen3.5: short convolution, delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.cache import DeltaState
from eagle3_jax.config import TargetConfig
from eagle3_jax.layers.linear import Linear
from eagle3_jax.layers.merged import MergedLinear, Part, merge, project_parts
from eagle3_jax.layers.norm import GatedRMSNorm
from eagle3_jax.per_device import Axes, divides, per_device
from pallas_kernels import gated_delta
from pallas_kernels.causal_conv import causal_conv


class ShortConv(nnx.Module):
    """Depthwise causal convolution. `weight` [kernel, channels], oldest tap first."""

    def __init__(self, kernel: int, channels: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param((jax.random.normal(rngs.params(), (kernel, channels)) * kernel**-0.5).astype(dtype))

    def __call__(self, inputs: Array, segment_ids: Array | None = None) -> Array:
        return causal_conv(inputs, self.weight[...], segment_ids)


# Logical axes of what the delta rule takes and gives.
_SLOTS: Axes = ("slots",)
_STATE: Axes = ("slots", "heads", "replicated", "replicated")
_VECTORS: Axes = ("slots", "replicated", "heads", "replicated")
_NUMBERS: Axes = ("slots", "replicated", "heads")
_MIXED = (_VECTORS, _VECTORS, _VECTORS, _NUMBERS, _NUMBERS)


class _Keys(TypedDict):
    key_heads: int
    key_width: int


class Projections(NamedTuple):
    """Of a layer's input [B,T,D], in its dtype: qkv [B,T,channels], z [B,T,Hv*dv], b and a [B,T,Hv].

    Merged, all of them are parts of one array; qkv comes first in its own.
    """

    qkv: Part
    z: Part
    b: Part
    a: Part


class GatedDeltaNet(nnx.Module):
    """Three passes over one set of weights: `__call__` (a whole sequence), `prefill` and `window` (from a cache)."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.in_proj_qkv: Linear | None = Linear(hidden, config.linear_conv_dim, dtype=dtype, rngs=rngs)
        self.in_proj_z: Linear | None = Linear(hidden, config.linear_value_dim, dtype=dtype, rngs=rngs)
        self.in_proj_b: Linear | None = Linear(hidden, heads, dtype=dtype, rngs=rngs)
        self.in_proj_a: Linear | None = Linear(hidden, heads, dtype=dtype, rngs=rngs)
        self.in_proj: MergedLinear | None = None
        self.conv1d = ShortConv(config.linear_conv_kernel_dim, config.linear_conv_dim, dtype=dtype, rngs=rngs)
        # The decay's parameters stay float32 in every dtype: exp(A_log) multiplies a sum over the whole context.
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16.0)))
        self.dt_bias = nnx.Param(jnp.ones((heads,), jnp.float32))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps, dtype=dtype)
        self.out_proj = Linear(config.linear_value_dim, hidden, dtype=dtype, rngs=rngs)
        self.config = config

    def merge(self) -> None:
        """One product for the four projections of the input, see `eagle3_jax.layers.merged`."""
        merge(self, "in_proj", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))

    def __call__(self, x: Array, valid: Array | None = None, segment_ids: Array | None = None) -> Array:
        """x [B,T,D] from an empty state. `valid` [B,T] is False on right padding; `segment_ids` [B,T] start anew."""
        p = self._project(x)
        qkv, gates = p.qkv.cut(), gated_delta.Gates(p.a.cut(), p.b.cut(), self.A_log[...], self.dt_bias[...])
        tail = jnp.zeros((x.shape[0], self.config.linear_conv_kernel_dim - 1, qkv.shape[-1]), qkv.dtype)
        convolved = self.conv1d(jnp.concatenate([tail, qkv], axis=1), segment_ids)
        mixed = gated_delta.prepared(convolved, gates, valid, **self._keys)
        out, _ = gated_delta.chunked(*mixed, self._zero_state(x.shape[0]), segment_ids=segment_ids)
        return self._finish(p, out)

    def prefill(
        self, x: Array, valid: Array, num_valid: Array, pending: Array, past: DeltaState
    ) -> tuple[Array, DeltaState]:
        """A chunk of prompt: commits what was pending, then the chunk's first `num_valid` [B] tokens."""
        p = self._project(x)
        history, mixed = self._inputs(p, valid, pending, past, implementation="reference")
        state = gated_delta.fold(past.state, *_pending(past, pending))
        out, state = _on_each_device(gated_delta.chunked, (*mixed, state), (*_MIXED, _STATE), (_VECTORS, _STATE))
        tail = _rows(history, num_valid, self.config.linear_conv_kernel_dim - 1)
        inputs = jnp.pad(tail, [(0, 0), (0, past.inputs.shape[1] - tail.shape[1]), (0, 0)])
        return self._finish(p, out), past.replace(state=state, inputs=inputs)

    def window(self, x: Array, valid: Array, pending: Array, past: DeltaState) -> tuple[Array, DeltaState]:
        """Tokens that verification has yet to accept: folds in what was pending, leaves the window itself pending."""
        p = self._project(x)
        history, mixed = self._inputs(p, valid, pending, past)
        old = _pending(past, pending)
        held = (past.state, old.keys, old.updates, old.log_decay, old.accepted)
        axes = (_STATE, _VECTORS, _VECTORS, _NUMBERS, _SLOTS, *_MIXED)
        out, updates, state = _on_each_device(_step, (*held, *mixed), axes, (_VECTORS, _VECTORS, _STATE))
        return self._finish(p, out), DeltaState(state, mixed.k, updates, mixed.g, history)

    def _project(self, x: Array) -> Projections:
        maps = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        return Projections(*project_parts(x, self.in_proj, *maps))

    def _inputs(
        self, p: Projections, valid: Array, pending: Array, past: DeltaState, implementation: str | None = None
    ) -> tuple[Array, gated_delta.Inputs]:
        assert p.qkv.start == 0, "queries, keys and values come first in their product"
        gates = gated_delta.Gates(p.a.whole, p.b.whole, self.A_log[...], self.dt_bias[...])
        return gated_delta.inputs(
            past.inputs, pending, p.qkv.whole, gates, valid, self.conv1d.weight[...], **self._keys,
            gates_at=(p.a.start, p.b.start), implementation=implementation,
        )  # fmt: skip

    @property
    def _keys(self) -> _Keys:
        return {"key_heads": self.config.linear_num_key_heads, "key_width": self.config.linear_key_head_dim}

    def _finish(self, p: Projections, out: Array) -> Array:
        return self.out_proj(self.norm(out, p.z.cut().reshape(out.shape)).reshape(*out.shape[:2], -1))

    def _zero_state(self, batch: int) -> Array:
        c = self.config
        return jnp.zeros((batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim), jnp.float32)


def _step(state: Array, keys: Array, updates: Array, log_decay: Array, accepted: Array, *mixed: Array) -> Any:
    return gated_delta.step(state, gated_delta.Pending(keys, updates, log_decay, accepted), *mixed)


def _on_each_device(
    rule: Callable[..., Any], args: tuple[Array, ...], inputs: tuple[Axes, ...], outputs: tuple[Axes, ...]
) -> Any:
    """`rule` by slots and heads, if these divide: then each device has the key heads of its value heads."""
    vectors = [x for x, axes in zip(args, inputs, strict=True) if axes == _VECTORS]
    whole = all(divides("slots", len(x)) and divides("heads", x.shape[2]) for x in vectors)
    return per_device(rule, args, inputs, outputs) if whole else rule(*args)


def _pending(past: DeltaState, accepted: Array) -> gated_delta.Pending:
    return gated_delta.Pending(past.keys, past.updates, past.log_decay, accepted)


def _rows(x: Array, start: Array, count: int) -> Array:
    """`count` tokens of x [B,T,C] from each row's own `start` [B]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, count))(x, start)
