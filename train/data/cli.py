"""`eagle3 data COMMAND`: a table of subcommands, each a module imported when it is called, as in `eagle3_jax.cli`."""

from __future__ import annotations

import argparse

from eagle3_jax.cli import Command, run_command

COMMANDS = {
    "prepare": Command("train.data.prepare", "conversations to tokens and loss masks, once"),
    "vocab": Command("train.data.vocab_file", "the draft vocabulary of prepared data"),
    "regenerate": Command("train.data.regenerate", "let the target answer prompts itself", True),
    "features": Command("train.data.feature_files", "what the target says to prepared data, to train without it", True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{parser.description}\n\ncommands:\n" + "\n".join(lines)
    parser.epilog = f"{parser.prog} COMMAND --help describes a command."
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")


def run(args: argparse.Namespace) -> int:
    command = COMMANDS[args.command]
    parser = argparse.ArgumentParser(prog=f"eagle3 data {args.command}", description=command.help)
    return run_command(command, parser, args.arguments)
