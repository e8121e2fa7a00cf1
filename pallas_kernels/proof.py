"""A kernel that is a default proves itself first: once in a process it is compared with its reference on this device.

What lowers a kernel differs between versions of jax and between devices, and tests interpret kernels on a CPU. A small
case costs a second or two when a kernel is first traced; a kernel that fails it gives way to the reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

_verdicts: dict[str, str | None] = {}
_one_at_a_time = threading.Lock()


def require(
    operation: str,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    case: Callable[[], tuple[Any, ...]],
    rtol: float,
) -> None:
    """Returns if `kernel` gives what `reference` gives for the arguments that `case` makes, or did so before.

    Raises:
      NotImplementedError: it does not, or cannot be compiled; with the reason.
    """
    with _one_at_a_time:  # programs may be traced in several threads
        if operation not in _verdicts:
            # In a thread of its own, since this one may be in the midst of tracing the function that wants the kernel.
            with ThreadPoolExecutor(1) as thread:
                _verdicts[operation] = thread.submit(_verdict, kernel, reference, case, rtol).result()
    if reason := _verdicts[operation]:
        raise NotImplementedError(f"{operation}: {reason}")


def _verdict(
    kernel: Callable[..., Any], reference: Callable[..., Any], case: Callable[[], tuple[Any, ...]], rtol: float
) -> str | None:
    """None, or what is wrong."""
    try:
        arguments = case()
        got, want = (jax.tree.leaves(jax.jit(f)(*arguments)) for f in (kernel, reference))
        worst = max(_relative_error(np.asarray(a), np.asarray(b)) for a, b in zip(got, want, strict=True))
    except Exception as error:  # whatever a compiler may raise
        return f"{type(error).__name__}: {error}"
    return None if worst <= rtol else f"differs from the reference on this device by {worst:.1e}, relative"


def _relative_error(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = float(np.linalg.norm(got - want)) / max(float(np.linalg.norm(want)), 1e-30)
    return error if np.isfinite(error) else float("inf")
