"""Weights in and out: Hugging Face folders, drafter formats, training checkpoints."""

from __future__ import annotations

from eagle3_jax.checkpoint.hf import LoadedTarget, load_target
from eagle3_jax.checkpoint.hf_save import save_target
from eagle3_jax.checkpoint.problems import CheckpointError

__all__ = ["CheckpointError", "LoadedTarget", "load_target", "save_target"]
