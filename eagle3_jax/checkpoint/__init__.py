"""Weights in and out: Hugging Face folders, drafter formats, training checkpoints."""
