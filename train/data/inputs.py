"""What a run reads or writes late, looked at before it starts: better now than after hours of training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from eagle3_jax.checkpoint.source import read_json, resolve
from train.places import is_address
from train.recipe import Recipe, RecipeError


def check_inputs(recipe: Recipe) -> None:
    """Looks at files, the head to go on from and the folders that are written, which are made.

    Raises:
      RecipeError: naming every key whose file or folder cannot be used.
      CheckpointError: the head is not there.
    """
    stored = [recipe.features] if recipe.features else []
    files = {"data.files": recipe.data.files, "features": stored, "evaluate.files": recipe.evaluate.files}
    problems = [problem for key, paths in files.items() for problem in _missing(key, paths)]
    if problems:
        raise RecipeError("recipe: " + "; ".join(problems))
    if recipe.draft.init_from is not None:
        folder = resolve(recipe.draft.init_from)
        read_json(folder, "config.json", required=True)
    check_writable(Path(recipe.output), "output")
    if recipe.checkpoints is not None and not is_address(recipe.checkpoints):
        check_writable(Path(recipe.checkpoints), "checkpoints")


def _missing(key: str, files: Iterable[str]) -> Iterable[str]:
    return (f"{key}: {file}: no such file" for file in files if not Path(file).exists())


def check_writable(folder: Path, key: str) -> None:
    """Makes the folder and writes to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(f"{key}={folder} cannot be written: {error.strerror or error}") from error
