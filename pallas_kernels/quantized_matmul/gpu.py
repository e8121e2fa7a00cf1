"""Pallas GPU kernel of a product of few rows with a matrix in one byte: the bytes go from memory to tensor cores.

Such a product lasts as long as the matrix takes to be read, if nothing else takes longer. Widening every value by
itself and passing it through shared memory does. Tensor cores want two inputs of one output side by side in a register;
in memory the outputs lie side by side. So a thread reads `columns` neighbouring outputs of the very 16 inputs that the
tensor core expects from it (of every 64: eight neighbours, and the eight that lie 32 further on), and one permutation
of bytes takes from two such rows the pair that it wants; three more instructions make two bfloat16 of it. Its outputs
come out of order, and are put in order once, at the end.

Programs share the matrix by columns, and by inputs too where columns alone would be few; XLA then adds their sums.
Lowered by Pallas' Triton route, named explicitly; see `pallas_kernels` on why. What it makes of this is
fast only as long as Triton deals inputs out to threads in eights (`Tiles.dealt`); it is right in any case.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import dispatch

MAX_ROWS = 32  # with more, XLA's product of what it widens is as fast (benchmarks/RESULTS.md)
DEPTH = 64  # inputs that a program takes at a time
SMALL_BLOCK = 128


class Tiles(NamedTuple):
    """Of a program: outputs that a thread reads at once; warps; stages of Triton's pipeline; shares of the inputs; and
    how many neighbouring inputs are one thread's, which speed alone depends on."""

    columns: int
    warps: int
    stages: int = 1
    splits: int = 1
    dealt: int = 8

    @property
    def outputs(self) -> int:
        return 8 * self.warps * self.columns


FEW, MANY = Tiles(16, 2), Tiles(4, 4, stages=3)  # up to 16 rows, and more: what is summed stays in registers
WARPS = 16 * 132  # of MANY at once on an H100 or H200: splitting the inputs makes no more


@partial(jax.jit, static_argnames=("block", "tiles", "interpret"))  # so that a program of many layers lowers it once
def quantized_matmul(
    x: Array, values: Array, scale: Array, *, block: int, tiles: Tiles | None = None, interpret: Any = False
) -> Array:
    """As `reference.quantized_matmul`, but that sums are made in another order, and NaN in e4m3 is read as 480.

    Raises NotImplementedError for what `check` names. `tiles`: for measuring. `interpret`: as of `pl.pallas_call`.
    """
    step = block if len(scale) > 1 else DEPTH
    tiles = tiles or tiles_for(x.size // max(x.shape[-1], 1), values.shape, step)
    check(x, values, scale, block, tiles, interpret)
    inputs, outputs = values.shape
    rows = x.reshape(-1, inputs)
    share = inputs // tiles.splits
    sums = pl.pallas_call(
        partial(_kernel, padded(x), tiles, step, len(scale) > 1, interpret),
        grid=(outputs // tiles.outputs, tiles.splits),
        in_specs=[
            pl.BlockSpec((len(rows), share), lambda n, s: (0, s)),
            pl.BlockSpec((share, tiles.outputs), lambda n, s: (s, n)),
            pl.BlockSpec((share // step if len(scale) > 1 else 1, tiles.outputs), lambda n, s: (s, n)),
        ],
        out_specs=pl.BlockSpec((None, len(rows), tiles.outputs), lambda n, s: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct((tiles.splits, len(rows), outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="quantized_matmul",
    )(rows, values, scale)
    total = jnp.sum(sums, axis=0)
    return (total if len(scale) > 1 else total * scale).astype(x.dtype).reshape(*x.shape[:-1], outputs)


def check(
    x: Array, values: Array, scale: Array, block: int, tiles: Tiles | None = None, interpret: Any = False
) -> None:
    """Raises NotImplementedError where there is no GPU, for other dtypes, too many rows, and matrices that tiles do not
    divide."""
    inputs, outputs = values.shape
    step = block if len(scale) > 1 else DEPTH
    tiles = tiles or tiles_for(x.size // inputs, values.shape, step)
    dispatch.require_gpu(interpret)
    if x.dtype != jnp.bfloat16 or values.dtype not in (jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(f"{x.dtype} by {values.dtype}, not bfloat16 by int8 or float8_e4m3fn")
    if not 0 < x.size <= MAX_ROWS * inputs:
        raise NotImplementedError(f"{x.size // inputs} rows; at least one and at most {MAX_ROWS}")
    if step % DEPTH or inputs % (step * tiles.splits) or outputs % tiles.outputs:
        raise NotImplementedError(f"a matrix {inputs} x {outputs} in blocks of {step}: tiles do not divide it")


def padded(x: Array) -> int:
    """Rows of x as a tensor core takes them."""
    return max(16, pl.next_power_of_2(x.size // x.shape[-1]))


def tiles_for(rows: int, shape: tuple[int, ...], step: int) -> Tiles:
    """What is used by itself for so many rows and a matrix [in, out], whose inputs are shared by whole steps."""
    inputs, outputs = shape
    tiles = FEW if rows <= 16 else MANY
    across = max(outputs // tiles.outputs, 1)
    if rows > 16:  # all programs run at once, and their sums are few bytes beside the matrix
        most = max(min(inputs // (32 * rows), WARPS // (tiles.warps * across)), 1)
        return tiles._replace(splits=max(n for n in _divisors(inputs // step) if n <= most))
    least = max(8, -(-256 // across))
    splits = min((n for n in _divisors(inputs // step) if n >= least), default=max(inputs // step, 1))
    return tiles._replace(splits=splits, stages=2 if across * splits > 400 else 3)  # the fastest on an H200


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0] or [1]


def _kernel(
    padded: int, tiles: Tiles, step: int, by_block: bool, interpret: Any, x: Any, values: Any, scale: Any, out: Any
) -> None:
    lanes, columns = 8 * tiles.warps, tiles.columns
    nothing = jnp.zeros((padded, tiles.outputs), jnp.float32)
    at = jnp.arange(tiles.outputs, dtype=jnp.int32)
    own = at % lanes * columns + at // lanes  # which output stands where

    def tile(start: Array, total: Array) -> Array:
        matrix = _matrix(values, start, tiles, interpret)
        return total + jnp.dot(_rows(x, start, padded), matrix, preferred_element_type=jnp.float32)

    def one_block(i: Array, total: Array) -> Array:
        inner = lambda j, part: tile(i * step + j * DEPTH, part)
        part = lax.fori_loop(0, step // DEPTH, inner, nothing)
        return total + part * plgpu.load(scale.at[i, own])[None, :]

    every = one_block if by_block else lambda i, total: tile(i * step, total)
    total = lax.fori_loop(0, values.shape[0] // step, every, nothing)
    total = total.reshape(padded, columns, lanes).transpose(0, 2, 1).reshape(padded, tiles.outputs)
    row = jnp.arange(padded, dtype=jnp.int32)[:, None]
    plgpu.store(out.at[row, at[None, :]], total, mask=row < x.shape[0])


def _rows(x: Any, start: Array, padded: int) -> Array:
    """[padded, DEPTH] inputs of all rows from `start` on; 0 in rows that there are not."""
    row = jnp.arange(padded, dtype=jnp.int32)[:, None]
    inputs = start + jnp.arange(DEPTH, dtype=jnp.int32)[None, :]
    return plgpu.load(x.at[row, inputs], mask=row < x.shape[0], other=0)


def _matrix(values: Any, start: Array, tiles: Tiles, interpret: Any) -> Array:
    """[DEPTH, outputs] in bfloat16: the inputs from `start` on; output j * lanes + n is where n * columns + j was."""
    lanes, columns, dealt = 8 * tiles.warps, tiles.columns, tiles.dealt
    count = lambda n, axis: jnp.expand_dims(jnp.arange(n, dtype=jnp.int32), [i for i in range(3) if i != axis])
    whose = jnp.broadcast_to(dealt * count(4, 0), (4, lanes, columns))
    which = jnp.broadcast_to(columns * count(lanes, 1) + count(columns, 2), (4, lanes, columns))
    inputs = [first + i for first in range(0, DEPTH, 4 * dealt) for i in range(dealt)]
    read = [plgpu.load(values.at[start + i + whose, which]) for i in inputs]
    pairs = [_pair(a, b, interpret) for a, b in zip(read[::2], read[1::2], strict=True)]
    halves = [half for pair in pairs for half in (pair, lax.shift_right_logical(pair, jnp.int32(16)))]
    found = _joined([lax.bitcast_convert_type(half.astype(jnp.int16), jnp.bfloat16) for half in halves])
    found = found.reshape(4, lanes, columns, DEPTH // (4 * dealt), dealt).transpose(3, 0, 4, 2, 1)
    return found.reshape(DEPTH, tiles.outputs)


def _joined(arrays: list[Array]) -> Array:
    """Side by side on new axes at the end, which Triton adds two by two."""
    while len(arrays) > 1:
        half = len(arrays) // 2
        arrays = [jnp.stack(pair, axis=-1) for pair in zip(arrays[:half], arrays[half:], strict=True)]
    return arrays[0]


# What stands in both bytes of each half of the word p, as two bfloat16.
# int8: 128 + its lower bits, less 128 or, if its highest bit is set, 256: the bits of these stand below 0x43.
# e4m3: its exponent and mantissa, which in the places of those of bfloat16 are 2**120 too small, times +-2**120.
_INT8 = """lop3.b32 a, p, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, p, 0x00800080, 0x43004300, 0xea;
sub.rn.bf16x2 {out}, a, b;"""
_E4M3 = """shl.b32 a, p, 4;
and.b32 a, a, 0x07f007f0;
lop3.b32 b, p, 0x80008000, 0x7b807b80, 0xea;
mul.rn.bf16x2 {out}, a, b;"""


def _pair(a: Array, b: Array, interpret: Any) -> Array:
    """int32: a in bfloat16 in the lower halves, b in the upper; both are int8 or e4m3."""
    if interpret:
        bits = lambda x: lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
        return bits(a) | bits(b) << 16
    words = plgpu.elementwise_inline_asm(
        assembly(a.dtype),
        args=[a, b],
        constraints="=r,=r,=r,=r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.int32)],
    )
    return words[0]


def assembly(dtype: Any) -> str:
    """PTX from four values in $4 and four in $5 to $0 to $3. These are written last, for they may be $4 and $5."""
    lines = ["{", ".reg .b32 p, a, b, w0, w1, w2, w3;"]
    for i, selected in enumerate(("0x4400", "0x5511", "0x6622", "0x7733")):  # byte i of $4, and of $5
        lines += [f"prmt.b32 p, $4, $5, {selected};", (_INT8 if dtype == jnp.int8 else _E4M3).format(out=f"w{i}")]
    return "\n".join([*lines, *(f"mov.b32 ${i}, w{i};" for i in range(4)), "}"])


def small_case(rows: int, dtype: Any, by_block: bool) -> tuple[Any, ...]:
    """Arguments of `quantized_matmul`: one row fewer than `rows`, and every value that there is."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    values = np.delete(np.arange(256, dtype=np.uint8), [] if dtype == jnp.int8 else [127, 255])  # no NaN
    drawn = jnp.asarray(rng.choice(values, size=(512, 512)))
    scale = jnp.exp(normal(512 // SMALL_BLOCK if by_block else 1, 512))
    return normal(rows - 1, 512).astype(jnp.bfloat16), lax.bitcast_convert_type(drawn, dtype), scale


interpreted = partial(quantized_matmul, interpret=True)
