"""Generation: sampling, verification, the cycle, and the public LLM class.

`LLM` and `SamplingParams` are resolved on first use: importing one module of this package does not load the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.llm import LLM
    from infer.outputs import CompletionOutput, RequestOutput, SpecMetrics
    from infer.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "SpecMetrics"]

_MODULES = {
    "LLM": "infer.llm",
    "CompletionOutput": "infer.outputs",
    "RequestOutput": "infer.outputs",
    "SamplingParams": "infer.params",
    "SpecMetrics": "infer.outputs",
}


def __getattr__(name: str) -> Any:
    """Resolve public names on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
