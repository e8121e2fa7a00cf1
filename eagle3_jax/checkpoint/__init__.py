"""Weights in and out: Hugging Face folders, drafter formats, training checkpoints."""

from __future__ import annotations

from eagle3_jax.checkpoint.drafter import LoadedDrafter, load_drafter
from eagle3_jax.checkpoint.hf import LoadedTarget, load_target
from eagle3_jax.checkpoint.hf_save import save_target
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.specforge import save_specforge

__all__ = [
    "CheckpointError",
    "LoadedDrafter",
    "LoadedTarget",
    "load_drafter",
    "load_target",
    "save_specforge",
    "save_target",
]
