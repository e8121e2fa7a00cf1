"""EAGLE-3 speculative decoding in JAX: what a target and a drafter are.

`LLM` and `SamplingParams` live in `infer`, which imports this package, and are offered here for convenience. They are
resolved on first use, so that `import eagle3_jax.config` loads neither the engine nor anything that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer import LLM, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]

_FROM_INFER = ("LLM", "SamplingParams")


def __getattr__(name: str) -> Any:
    """Resolve `LLM` and `SamplingParams` on first use (PEP 562)."""
    if name not in _FROM_INFER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("infer"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
