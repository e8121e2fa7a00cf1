"""Weights in one byte: int8 or e4m3 values, and float32 scales that many of them share.

Only weights: activations, caches and products keep the model's dtype. Quantised are the matrices of the decoder layers
(`MATRICES`), nearly all bytes of a model. The rest stays as it is: the embedding (a lookup reads few rows of it), the
output layer (its error would go straight into the logits, and tied models share it with the embedding), norms,
convolutions, routers and gates (small; a router's choices are discrete, and a decay's error is compounded).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.errors import ConfigError
from eagle3_jax.sharding import current_layout
from pallas_kernels.quantized_matmul import dequantize, held, quantized_matmul, spread

__all__ = [
    "E4M3", "MATRICES", "QUANTIZATIONS", "SCALE", "Matrix", "Quantization", "Quantized", "find_quantization", "held",
    "matmul", "matrix", "quantize", "quantize_model", "ragged_dot", "store",
]  # fmt: skip

SCALE = "_scale"
"""A quantised parameter's scale is the parameter of this ending beside it."""
MATRICES = re.compile(
    r"layers\.\d+\.(self_attn\.[qkvo]_proj\.kernel|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.kernel"
    r"|mlp\.(shared_expert\.)?(gate|up|down)_proj\.kernel|mlp\.experts\.(gate|up|down)_proj)"
)

_LANES = 128  # columns of a TPU's tile
_BY_OUTPUT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How weights are stored: `largest` is the greatest magnitude used of `dtype`.

    A scale belongs to one output and `block` of its inputs; None: to all of its inputs.
    """

    dtype: Any
    largest: float
    block: int | None = None


E4M3 = Quantization(jnp.float8_e4m3fn, 448.0)
QUANTIZATIONS = {
    "int8": Quantization(jnp.int8, 127.0),
    "fp8": E4M3,
    "fp8_per_block": dataclasses.replace(E4M3, block=128),
}


def find_quantization(name: object) -> Quantization:
    """By name, as in vLLM. Raises ConfigError for one that is not offered."""
    if not isinstance(name, str) or name not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ConfigError(f"quantization={name!r} is not offered; choose one of {known}, or None")
    return QUANTIZATIONS[name]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """`values` [..., in, out] in one byte; `scale` [..., blocks, out] float32, each for `block` inputs of one output.

    One block for all inputs: `block` is then 0.
    """

    values: Array
    scale: Array
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def in_parts(self, parts: int) -> Quantized:
        """With blocks so small that each of so many equal parts of the inputs has whole ones."""
        inputs = self.shape[-2]
        block = math.gcd(self.block, inputs // parts)
        if self.scale.shape[-2] == 1 or block == self.block:
            return self
        scale = jnp.repeat(self.scale, self.block // block, axis=-2)[..., : inputs // block, :]
        return dataclasses.replace(self, scale=scale, block=block)

    def dequantize(self, dtype: DTypeLike) -> Array:
        """[..., in, out]: the product in float32, rounded once."""
        return dequantize(self.values, self.scale, self.block).astype(dtype)


Matrix = Array | Quantized


def quantize(w: Array, how: Quantization) -> Quantized:
    """Rounds w [..., in, out] to the nearest, symmetrically: the largest magnitude of a block becomes `how.largest`."""
    inputs = w.shape[-2]
    block = how.block or inputs
    exact = w.astype(jnp.float32)
    padded = jnp.pad(jnp.abs(exact), [(0, 0)] * (w.ndim - 2) + [(0, -inputs % block), (0, 0)])
    most = jnp.max(padded.reshape(*w.shape[:-2], -1, block, w.shape[-1]), axis=-2)
    scale = jnp.where(most > 0, most / how.largest, 1.0)
    values = jnp.clip(exact / spread(scale, block, inputs), -how.largest, how.largest)
    if jnp.issubdtype(how.dtype, jnp.integer):
        values = jnp.round(values)
    return Quantized(values.astype(how.dtype), scale, how.block or 0)


def matmul(x: Array, w: Matrix) -> Array:
    """x [..., in] @ w [in, out], in the dtype of x."""
    if not isinstance(w, Quantized):
        return jnp.matmul(x, w)
    return quantized_matmul(x, w.values, w.scale, block=w.block, parts=_parts())


def _parts() -> int:
    """In how many equal parts inputs may lie on the devices of a mesh."""
    layout = current_layout()
    return 1 if layout is None else math.lcm(layout.mesh.shape["tensor"], layout.mesh.shape["fsdp"])


def ragged_dot(x: Array, w: Matrix, group_sizes: Array, dtype: DTypeLike | None = None) -> Array:
    """`jax.lax.ragged_dot`: x [rows, in], sorted into groups, with w [groups, in, out]; in `dtype`, or that of x.

    A TPU multiplies groups by int8 as it is; fp8 it first writes out in full, which saves memory and no time.
    """
    dtype = dtype or x.dtype
    if not isinstance(w, Quantized):
        return _groups(x, w, group_sizes, dtype)
    w = held(w, x)
    if w.scale.shape[-2] > 1:
        return _groups(x, w.dequantize(x.dtype), group_sizes, dtype)
    direct = w.values.dtype == jnp.int8 and x.dtype == jnp.bfloat16
    # The direct product is exact but for its sum, and is not to be had at any other precision.
    precision = jax.lax.Precision.DEFAULT if direct else None
    values = w.values if direct else w.values.astype(x.dtype)
    y = _groups(x, values, group_sizes, jnp.float32, precision)
    scale = jnp.repeat(w.scale[:, 0], group_sizes, axis=0, total_repeat_length=len(x))
    return (y * scale).astype(dtype)


def _groups(x: Array, w: Array, sizes: Array, dtype: DTypeLike, precision: jax.lax.Precision | None = None) -> Array:
    """The product itself. Matrices whose outputs do not fill a TPU's tiles lie on their side there, and are read so:
    otherwise XLA would turn, and thereby pad, every one of them before it begins."""
    how: dict[str, Any] = {"precision": precision, "preferred_element_type": dtype}
    plain = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes, **how)
    if w.shape[-1] % _LANES == 0 or w.shape[-2] % _LANES:
        return plain(x, w, sizes)
    turned = lambda x, w, sizes: jax.lax.ragged_dot_general(x, jnp.swapaxes(w, 1, 2), sizes, _BY_OUTPUT, **how)
    return jax.lax.platform_dependent(x, w, sizes, tpu=turned, default=plain)


def matrix(owner: Any, name: str) -> Matrix:
    """The parameter `name` of a layer, with its scale if it is quantised."""
    scale = getattr(owner, name + SCALE)
    values = getattr(owner, name)[...]
    return values if scale is None else Quantized(values, scale[...], owner.block)


def store(owner: Any, name: str, found: Quantized) -> None:
    """Puts a quantised matrix in the place of the parameter `name` of a layer."""
    setattr(owner, name, nnx.Param(found.values))
    setattr(owner, name + SCALE, nnx.data(nnx.Param(found.scale)))
    owner.block = found.block


def quantize_model(model: Any, how: Quantization, paths: Collection[str] | None = None) -> Any:
    """Quantises the matrices of a target in place, one after another, and returns it.

    paths: dotted paths of the parameters, by default those that match `MATRICES`.
    """
    one = jax.jit(partial(quantize, how=how))
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    for path in names:
        if MATRICES.fullmatch(path) if paths is None else path in paths:
            *where, name = path.split(".")
            owner = functools.reduce(_child, where, model)
            store(owner, name, one(getattr(owner, name)[...]))
    return model


def _child(module: Any, name: str) -> Any:
    return module[int(name)] if name.isdigit() else getattr(module, name)
