"""Root-mean-square norms (Zhang and Sennrich 2019): alone, and with the residual addition that comes before one."""

from __future__ import annotations

from functools import partial

from jax import Array

from pallas_kernels import dispatch, proof
from pallas_kernels.norm import reference
from pallas_kernels.norm.reference import rms_norm

__all__ = ["add_rms_norm", "rms_norm"]


def add_rms_norm(
    x: Array, y: Array, weight: Array, *, eps: float, offset: float = 0.0, implementation: str | None = None
) -> tuple[Array, Array]:
    """A residual addition and the norm of the sum.

    Args:
      x, y: [..., D] of one dtype. weight: [D].
      offset: what is added to the weight: 1 for norms whose weights are centred on zero.
      implementation: see `pallas_kernels.dispatch`. "gpu" does both in one kernel and is the default on GPUs; it has no
        gradients.

    Returns:
      x + y, rounded to their dtype, and RMSNorm of that, computed in float32 and of the same dtype.
    """
    implementations = {"reference": reference.add_rms_norm, "gpu": _gpu}
    return dispatch.call(
        "norm.add_rms_norm", implementation, implementations, x, y, weight, default="gpu", eps=eps, offset=offset
    )


def _gpu(x: Array, y: Array, weight: Array, *, eps: float, offset: float) -> tuple[Array, Array]:
    dispatch.require_gpu()
    from pallas_kernels.norm import gpu  # Pallas takes a while to import

    kernel, plain = (partial(f, eps=1e-6, offset=1.0) for f in (gpu.add_rms_norm, reference.add_rms_norm))
    proof.require("norm.add_rms_norm on this GPU", kernel, plain, gpu.small_case, rtol=1e-2)
    return gpu.add_rms_norm(x, y, weight, eps=eps, offset=offset)
