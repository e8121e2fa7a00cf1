"""The one command, `eagle3`: a table of subcommands, each a module that is imported only when it is called.

A subcommand module offers `add_arguments(parser)` and `run(args) -> int | None` (the exit status; None is 0).
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import sys
from collections.abc import Container, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_jax import __version__
from eagle3_jax.errors import UserError

USAGE_ERROR = 2  # argparse's own status
INTERRUPTED = 130  # the shell's, for a process ended by SIGINT


class Command(NamedTuple):
    """Where a subcommand lives, the line that `eagle3 --help` prints for it, and whether several hosts can share it."""

    module: str
    help: str
    on_several_hosts: bool = False


COMMANDS = {
    "generate": Command("infer.generate_cli", "write text from prompts, with or without a drafter", True),
    "bench": Command("infer.bench_cli", "measure acceptance length and tokens per second on a set of prompts", True),
    "data": Command("train.data.cli", "prepare what heads are trained on: answers, tokens, vocabularies, features"),
    "train": Command("train.cli", "train a draft head from a recipe", True),
    "convert": Command("eagle3_jax.convert", "bring a draft head from any published format into any other"),
    "plan": Command("eagle3_jax.planning.cli", "say what generation or training needs on a slice, before it is rented"),
    "inspect": Command("eagle3_jax.inspect", "describe a model or drafter folder without loading its weights"),
    "check": Command("eagle3_jax.check", "compare a target with transformers, layer by layer"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `eagle3` with `argv` (default: the process's arguments) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `eagle3 ... | head`: the reader has gone, which is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        parser = _top_parser()
        parser.parse_args(arguments)  # prints and exits for --help and --version; an error for other options
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    name, *rest = arguments
    if name not in COMMANDS:
        raise UserError(_unknown(name))
    _keep_what_is_compiled(sys.modules)
    return _run(name, rest)


def _keep_what_is_compiled(loaded: Container[str]) -> None:
    """On disk for the next process, unless jax's own variable says where; jax reads it when it is `loaded`.

    Not where the CPU was asked for: what is tried there is small, and jaxlib has been seen to crash in writing it.
    """
    if "jax" not in loaded and os.environ.get("JAX_PLATFORMS") != "cpu":
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "eagle3-jax"))


def _run(name: str, arguments: list[str]) -> int:
    command = COMMANDS[name]
    return run_command(command, argparse.ArgumentParser(prog=f"eagle3 {name}", description=command.help), arguments)


def add_command_arguments(command: Command, parser: argparse.ArgumentParser) -> None:
    """The arguments of a command."""
    import_module(command.module).add_arguments(parser)
    if command.on_several_hosts:
        import_module("eagle3_jax.distributed").add_arguments(parser)


def run_command(command: Command, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Parses and runs; together with the other hosts, if the command can be shared and there are any."""
    add_command_arguments(command, parser)
    args, run = parser.parse_args(arguments), import_module(command.module).run
    if not command.on_several_hosts:
        return run(args) or 0
    with import_module("eagle3_jax.distributed").session(args):
        return run(args) or 0


def planner(mode: str) -> Any:
    """The module that plans for generation or training, of the room that does it; see `eagle3_jax.planning.account`."""
    return import_module({"generate": "infer.plan", "train": "train.plan"}[mode])


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="eagle3",
        usage="eagle3 COMMAND [ARGUMENTS]",
        description="EAGLE-3 speculative decoding in JAX.\n\ncommands:\n" + "\n".join(lines),
        epilog="eagle3 COMMAND --help describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    return parser


def _versions() -> str:
    """Versions read from installed metadata: nothing is imported for them."""
    others = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax"))
    return f"eagle3-jax {__version__} ({others}, python {platform.python_version()})"


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(COMMANDS)}"
    return f"unknown command {name!r}: {advice}"
