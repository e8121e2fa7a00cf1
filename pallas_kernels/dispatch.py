"""Which implementation of an operation runs, and why it was not another.

Every public function with kernels takes `implementation=`:
  None or "auto"   what `using` asks for, else the operation's default. A kernel that cannot do the job gives way to the
                   reference, and `fallbacks` says why.
  "reference"      plain jnp, which XLA compiles for any platform
  "tpu", ...       that kernel, or NotImplementedError with the reason

A kernel becomes the default only where a benchmark on that hardware shows it winning; otherwise the reference is, as on
TPUs, whose kernels have been interpreted and compiled but never timed. The choice is made when a function is
traced, so `using` must surround the first call of a jitted function; what is compiled keeps its choice. Pallas kernels
know no mesh: in a program over several devices they must be called inside `jax.shard_map`, else compilation fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")

REFERENCE = "reference"
DIVISIBLE = (REFERENCE, "cudnn")  # what XLA can lay out over a mesh
_preferred: ContextVar[str | None] = ContextVar("preferred", default=None)
_spread: ContextVar[bool] = ContextVar("spread", default=False)
_fallbacks: dict[str, str] = {}
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def using(implementation: str | None) -> Iterator[None]:
    """Operations traced inside prefer `implementation` ("tpu", ...) where they have it and it can do the job."""
    token = _preferred.set(implementation)
    try:
        yield
    finally:
        _preferred.reset(token)


@contextlib.contextmanager
def spread() -> Iterator[None]:
    """Operations traced inside are laid out over several devices by XLA, which cannot cut a Pallas kernel in parts."""
    token = _spread.set(True)
    try:
        yield
    finally:
        _spread.reset(token)


def is_spread() -> bool:
    """Whether this is traced inside `spread`."""
    return _spread.get()


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Inside `spread`: operations traced inside see one device's part (`jax.shard_map`), and kernels can run again."""
    token = _spread.set(False)
    try:
        yield
    finally:
        _spread.reset(token)


def fallbacks() -> dict[str, str]:
    """Operation -> why the preferred kernel last gave way to the reference, or to another kernel."""
    return dict(_fallbacks)


def gave_way(operation: str, reason: NotImplementedError) -> None:
    """For `fallbacks`, where one kernel gives way to another."""
    _fallbacks[operation] = str(reason)


def call(
    operation: str,
    implementation: str | None,
    implementations: Mapping[str, Callable[..., Result]],
    *args: Any,
    default: str = REFERENCE,
    **options: Any,
) -> Result:
    """Runs one of `implementations`, "reference" among them. Raises NotImplementedError if the one named cannot."""
    if implementation is not None and implementation != "auto":
        return _named(operation, implementation, implementations)(*args, **options)
    asked = _preferred.get()
    try:
        return _named(operation, asked or default, implementations)(*args, **options)
    except NotImplementedError as reason:
        if asked and _fallbacks.get(operation) != str(reason):
            _log.warning("%s: the reference is used: %s", operation, reason)
        gave_way(operation, reason)
    return implementations[REFERENCE](*args, **options)


def require_gpu(interpret: Any = False) -> None:
    """Raises NotImplementedError where there is no GPU, unless the kernel is interpreted (as `pl.pallas_call` is)."""
    if jax.default_backend() != "gpu" and not interpret:
        raise NotImplementedError("this kernel is for GPUs")


def _named(operation: str, name: str, implementations: Mapping[str, Callable[..., Result]]) -> Callable[..., Result]:
    if _spread.get() and name not in DIVISIBLE:
        raise NotImplementedError(f"{operation}: the kernel {name!r} is for one device, not for a mesh")
    if name not in implementations:
        raise NotImplementedError(f"{operation} has no implementation {name!r}, only {', '.join(implementations)}")
    return implementations[name]
