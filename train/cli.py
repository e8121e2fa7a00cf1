"""`eagle3 train RECIPE.yaml [key=value ...]`."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file (keys: train/recipe.py), or a ready recipe, such as qwen3.5-9b")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optimizer.learning_rate=3e-4")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from train.loop import TrainingError
    from train.recipe import load_recipe
    from train.run import train

    recipe = load_recipe(args.recipe, args.overrides)
    try:
        return train(recipe, quiet=args.quiet)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
