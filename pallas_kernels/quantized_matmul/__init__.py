"""Products of few rows with a matrix in one byte, int8 or e4m3, as decoding has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jax import Array

from pallas_kernels import dispatch, proof
from pallas_kernels.quantized_matmul import reference
from pallas_kernels.quantized_matmul.reference import dequantize, held, spread

__all__ = ["dequantize", "held", "quantized_matmul", "spread"]


def quantized_matmul(
    x: Array, values: Array, scale: Array, *, block: int, parts: int = 1, implementation: str | None = None
) -> Array:
    """x @ w, where w [in, out] is `values` times the scale that each shares with its block of inputs.

    Args:
      x: [..., in] bfloat16 or float32. values: [in, out] int8 or float8_e4m3fn. scale: [blocks, out] float32.
      block: inputs of a block; the last may have fewer. With one block for all inputs it does not count.
      parts: equal parts in which the inputs lie on several devices, where the reference multiplies blocks one by one
        only if each part has whole ones.
      implementation: see `pallas_kernels.dispatch`. "gpu", the default on GPUs, reads every byte of the matrix once,
        as it is, for up to 32 rows of bfloat16.

    Returns:
      [..., out] of the dtype of x. Sums are float32, and rounded once, with their scale.
    """
    implementations: dict[str, Callable[..., Array]] = {"reference": reference.quantized_matmul, "gpu": _gpu}
    args = (x, values, scale)
    return dispatch.call(
        "quantized_matmul", implementation, implementations, *args, default="gpu", block=block, parts=parts
    )


def _gpu(x: Array, values: Array, scale: Array, *, block: int, parts: int) -> Array:
    dispatch.require_gpu()
    from pallas_kernels.quantized_matmul import gpu  # Pallas takes a while to import

    gpu.check(x, values, scale, block)
    rows, by_block = gpu.padded(x), len(scale) > 1
    kernel, plain = (partial(f, block=gpu.SMALL_BLOCK) for f in (gpu.quantized_matmul, reference.quantized_matmul))
    case = partial(gpu.small_case, rows, values.dtype, by_block)
    name = f"quantized_matmul of {rows} rows by {values.dtype}{' in blocks' if by_block else ''} on this GPU"
    proof.require(name, kernel, plain, case, rtol=1e-2)
    return gpu.quantized_matmul(x, values, scale, block=block)
