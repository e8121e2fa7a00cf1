"""`eagle3 data prepare`: conversations to tokens and masks once, for every run that will read them."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle3_jax.checkpoint.hf import read_config
from eagle3_jax.checkpoint.source import read_json, resolve
from eagle3_jax.errors import UserError
from train.data.batches import DataError, DataReport
from train.data.checksums import file_checksum, template_checksum, tokenizer_checksum
from train.data.conversations import Row
from train.data.mask import ChatRenderer
from train.data.renderer import add_template_arguments, parse_template_kwargs
from train.data.rendering import Rendering, render_all
from train.data.shards import ROWS, ShardWriter, row_counts, row_tensors
from train.data.sources import read_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help=".jsonl, .json, .parquet, or folders of saved datasets")
    parser.add_argument("--target", required=True, help="folder or hub id of the model to draft for")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for data.files of a recipe")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a sequence (default: 2048)")
    overlong = parser.add_mutually_exclusive_group()
    overlong.add_argument("--truncate", dest="overlong", action="store_const", const="truncate", default="truncate",
                          help="cut longer sequences (default)")  # fmt: skip
    overlong.add_argument("--drop", dest="overlong", action="store_const", const="drop", help="leave them out")
    parser.add_argument("--changed-turns", choices=("split", "drop", "error"), default="split",
                        help="answers that a later turn changes: see data.changed_turns (default: split)")  # fmt: skip
    add_template_arguments(parser)
    parser.add_argument("--workers", type=int, default=1, help="processes that render and tokenise (default: 1)")
    parser.add_argument("--shard-tokens", type=int, default=2**24, help="tokens of a file (default: 16,777,216)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    if min(args.max_length - 2, args.workers, args.shard_tokens) < 1:
        raise UserError("--max-length must be at least 3, --workers and --shard-tokens at least 1")
    how = _rendering(args)
    renderer = how.renderer()
    writer = ShardWriter(args.output, _settings(args, how, renderer))
    if writer.complete:
        print(f"{args.output}: complete already")
    else:
        prepare(args, how, renderer, writer)
    print(report_of(writer.state))
    return 0


def _rendering(args: argparse.Namespace) -> Rendering:
    folder = resolve(args.target, weights=False)
    # What is fetched of a hub's repository is only its tables: the tokenizer must be asked for by name.
    tokenizer = args.tokenizer or (None if Path(args.target).expanduser().is_dir() else args.target)
    vocab_size = read_config(read_json(folder, "config.json", required=True), folder).vocab_size
    kwargs = parse_template_kwargs(args.template_kwargs)
    return Rendering(folder, tokenizer, kwargs, args.changed_turns, args.max_length, args.overlong, vocab_size)


def _settings(args: argparse.Namespace, how: Rendering, renderer: ChatRenderer | None) -> dict[str, Any]:
    """What the rows depend on."""
    names = ("max_length", "overlong", "vocab_size", "changed_turns", "template_kwargs")
    files = {str(file): file_checksum(file) for file in args.files}
    chosen = {name: getattr(how, name) for name in names}
    return {
        "format": ROWS, "files": files, **chosen, "shard_tokens": args.shard_tokens,
        "tokenizer": tokenizer_checksum(renderer), "chat_template": template_checksum(renderer),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------- shards


def prepare(args: argparse.Namespace, how: Rendering, renderer: ChatRenderer | None, writer: ShardWriter) -> None:
    """Writes what is missing, a shard whenever `--shard-tokens` have come together.

    Raises:
      DataError: no row is left; the message is the report.
    """
    report, done = report_of(writer.state), int(writer.state.get("records", 0))
    if done:
        print(f"{len(writer.shards)} shards are there; going on after row {done}")
    rows, num_tokens = list[Row](), 0
    records = islice(chain.from_iterable(read_records(file) for file in args.files), done, None)
    progress = tqdm(render_all(records, how, renderer, args.workers), desc="preparing", unit="row", initial=done,
                    disable=args.quiet, dynamic_ncols=True)  # fmt: skip
    for found, part in progress:
        rows += found
        num_tokens += part.num_tokens
        report = _sum(report, part)
        done += 1
        if num_tokens >= args.shard_tokens:
            writer.write(row_tensors(rows), row_counts(rows), _state(done, report))
            rows, num_tokens = [], 0
    if rows:
        writer.write(row_tensors(rows), row_counts(rows), _state(done, report))
    if not writer.shards:
        raise DataError(f"no row can be trained on. {report}")
    writer.finish(_state(done, report))


def report_of(state: dict[str, Any]) -> DataReport:
    """The report that a folder's state holds, an empty one at the start."""
    saved = state.get("report", {})
    return DataReport(**{**saved, "dropped": Counter(saved.get("dropped", {}))})


def _sum(a: DataReport, b: DataReport) -> DataReport:
    names = [field.name for field in dataclasses.fields(DataReport)]
    return DataReport(**{name: getattr(a, name) + getattr(b, name) for name in names})


def _state(records: int, report: DataReport) -> dict[str, Any]:
    return {"records": records, "report": report.as_dict()}
