"""Flags that `eagle3 generate` and `eagle3 bench` share, and the LLM that they describe."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError
from infer.options import DEFAULT_DRAFTER, DEFAULT_DRAFTS, DEFAULT_MODEL, KERNELS, REJECTION_METHODS

SYNTHETIC_NOTICE = (
    "SYNTHETIC ACCEPTANCE: drafts were accepted at a fixed rate whatever they were; the text means nothing, and "
    "lengths and speeds are not those of this drafter"
)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"[{record.getMessage()}]", file=sys.stderr)


def show_notes() -> None:
    """Prints on standard error what loading has to say: tensors left out, choices made for the head, warnings."""
    logger = logging.getLogger("infer")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Notes) for handler in logger.handlers):
        logger.addHandler(_Notes())


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags on how models are loaded and drafts are judged."""
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    group.add_argument("--quantization", help="the target's matrices in one byte: int8, fp8 or fp8_per_block")
    group.add_argument("--kernels", default="auto", choices=KERNELS, help="see LLM(kernels=) (default: auto)")
    group.add_argument("--tp", type=int, default=1, help="devices over which the model is spread")
    group.add_argument("--mesh", help="instead of --tp: devices along several axes, as 'dp2 tp4' or 'ep4 tp2'")
    group.add_argument("--max-model-len", type=int, help="longest prompt and answer together, in tokens")
    group.add_argument("--revision", help="of a model named by its hub id")
    group.add_argument("--draft-revision", help="of a head named by its hub id")
    group.add_argument("--draft-sample-method", choices=("coupled", "greedy", "probabilistic"))
    group.add_argument("--rejection-sample-method", choices=REJECTION_METHODS)
    group.add_argument("--synthetic-acceptance-length", type=float, metavar="MEAN")


def engine_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `LLM` from the flags of `add_engine_arguments`."""
    return {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "kernels": args.kernels,
        "tensor_parallel_size": args.tp,
        "mesh": args.mesh,
        "max_model_len": args.max_model_len,
        "revision": args.revision,
    }


def speculative_config(
    args: argparse.Namespace, *, model: str | None, draft: str | None, drafts: int | None
) -> Mapping[str, Any] | None:
    """The speculative_config that the flags ask for; None for generation without a drafter.

    The default model brings its own head. Raises UserError when drafts are asked for and no head is named, or when
    flags on drafts are given and there are none.
    """
    head = draft if draft is not None else DEFAULT_DRAFTER if model is None else None
    flags = {
        "draft_sample_method": args.draft_sample_method,
        "rejection_sample_method": args.rejection_sample_method,
        "synthetic_acceptance_length": args.synthetic_acceptance_length,
        "revision": args.draft_revision,
    }
    methods = {name: value for name, value in flags.items() if value is not None}
    if drafts == 0 or (head is None and drafts is None):
        if methods:
            raise UserError(f"{', '.join(methods)}: there are no drafts without a head and at least one token to draft")
        return None
    if head is None:
        raise UserError(f"{drafts} tokens to draft, and no head: name its folder or hub id")
    return {"model": head, "method": "eagle3", "num_speculative_tokens": drafts or DEFAULT_DRAFTS, **methods}


def model_or_default(model: str | None) -> str | Path:
    """The target by name, so that `LLM` adds no head of its own accord."""
    return DEFAULT_MODEL if model is None else model
