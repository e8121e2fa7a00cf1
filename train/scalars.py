"""Where the numbers of metrics.jsonl go besides: TensorBoard files, Weights & Biases. Both are optional packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from train.recipe import Log, Recipe, RecipeError, flatten

PACKAGES: dict[Log, tuple[str, str]] = {"tensorboard": ("tensorboardX", "tensorboard"), "wandb": ("wandb", "wandb")}
"""What each needs: a module, and the extra of this package that brings it."""


class Scalars(Protocol):
    """Takes numbers by name, at a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_scalars(kinds: Sequence[Log]) -> None:
    """Raises RecipeError for a package that is missing, by name."""
    for kind in kinds:
        module, extra = PACKAGES[kind]
        try:
            import_module(module)
        except ImportError as error:
            raise RecipeError(
                f"log: {kind} needs the package {module} ({error}); pip install 'eagle3-jax[{extra}]', or leave it out"
            ) from error


def open_scalars(recipe: Recipe, start: int) -> list[Scalars]:
    """Those that the recipe names; what they hold after step `start` is replaced."""
    kinds: dict[Log, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [kinds[kind](recipe, start) for kind in recipe.log]


class TensorBoard:
    """Event files in OUTPUT/tensorboard, written by a thread that is at most some seconds late."""

    def __init__(self, recipe: Recipe, start: int) -> None:
        import tensorboardX

        purge = {"purge_step": start + 1} if start else {}
        self._writer = tensorboardX.SummaryWriter(str(Path(recipe.output) / "tensorboard"), flush_secs=10, **purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B, under whatever account, project and mode its own environment variables say.

    Its id is kept in OUTPUT/wandb_run, so that training that goes on goes on there.
    Raises UserError when W&B refuses to begin.
    """

    def __init__(self, recipe: Recipe, start: int) -> None:
        import wandb

        output = Path(recipe.output)
        mark = output / "wandb_run"
        known = mark.read_text(encoding="utf-8").strip() if start and mark.is_file() else None
        try:
            self._run = wandb.init(
                dir=str(output), name=output.name, id=known, resume="allow" if known else None, config=flatten(recipe)
            )
        except Exception as error:  # no key, no network, ...: whatever that package raises
            raise RecipeError(
                f"log: wandb cannot begin a run: {error}; log in with `wandb login`, set WANDB_MODE=offline, or leave "
                "wandb out"
            ) from error
        mark.write_text(str(self._run.id), encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
