"""`eagle3 data features`: what the target says to prepared rows, in files, so that training need not hold the target.

A shard of the folder (see `train.data.shards`) has, beside offsets, tokens and mask:

    aux.{b}   [N, D]        the residual stream entering layer b, for every boundary b
    hidden    [N, D]        after the final norm, from which the target's logits follow
    top1      [N] int32     the token that the target finds most likely next
    log_sum   [N] float32   the log-sum-exp of its logits over the whole vocabulary, for losses by acceptance
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from eagle3_jax.checkpoint import load_target
from eagle3_jax.checkpoint.hf import read_config
from eagle3_jax.checkpoint.source import read_json, resolve
from eagle3_jax.config import TargetConfig, check_aux_layers, default_aux_layers
from eagle3_jax.distributed import check_all_take_part, from_first, is_first, to_host
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.precision import join, matmul_precision, parse_dtype, split
from eagle3_jax.sharding import make_mesh
from eagle3_jax.target import Target
from train.data.batches import bucket_lengths, ordered_batches
from train.data.checksums import model_checksum
from train.data.conversations import Row
from train.data.shards import (
    FEATURES,
    NoWriter,
    ShardFolder,
    ShardWriter,
    open_folder,
    read_rows,
    row_counts,
    row_tensors,
)
from train.features import Features, target_features

Extract = Callable[[np.ndarray], Features]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="that `eagle3 data prepare` has written")
    parser.add_argument("--target", required=True, help="folder or hub id")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR2")
    parser.add_argument("--aux-layers", type=int, nargs="+", help="boundaries (default: 2, L//2 and L-3)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of target and files")
    parser.add_argument("--batch-size", type=int, default=8, help="rows that the target sees together (default: 8)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--shard-bytes", type=int, default=2**30, help="of a file, about (default: 1,073,741,824)")
    parser.add_argument("--estimate", action="store_true", help="say how much room it takes, and stop")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    if min(args.batch_size, args.shard_bytes) < 1:
        raise UserError("--batch-size and --shard-bytes must be at least 1")
    rows, folder = open_folder(args.folder), resolve(args.target, weights=not args.estimate)
    config = read_config(read_json(folder, "config.json", required=True), folder)
    if config.vocab_size != rows.settings["vocab_size"]:
        raise ConfigError(
            f"{args.folder} was prepared for a target of {rows.settings['vocab_size']} tokens, {args.target} has "
            f"{config.vocab_size}"
        )
    layers = check_aux_layers(args.aux_layers or default_aux_layers(config.num_layers), config.num_layers)
    a_token = bytes_a_token(config, len(layers), args.dtype)
    need = rows.num_tokens * a_token
    print(f"{rows.num_tokens:,} tokens x {a_token:,} bytes = {_size(need)}; {_size(_free(args.output))} are free")
    if args.estimate:
        return 0
    writer = open_writer(args.output, _settings(args, rows, folder, layers))
    if not writer.complete:
        if is_first():
            check_room(args.output, need - sum(shard["tokens"] for shard in writer.shards) * a_token)
        extract = make_extract(_load(args, folder), layers)
        write_features(rows, extract, writer, args.batch_size, max(args.shard_bytes // a_token, 1), quiet=args.quiet)
    print(f"{args.output}: complete, {len(writer.shards)} files")
    return 0


def _settings(args: argparse.Namespace, rows: ShardFolder, folder: Path, layers: Sequence[int]) -> dict[str, Any]:
    names = ("vocab_size", "max_length", "tokenizer")
    return {
        "format": FEATURES, "rows": rows.checksums, **{name: rows.settings.get(name) for name in names},
        "target": model_checksum(folder), "aux_layers": list(layers), "dtype": args.dtype,
        "shard_bytes": args.shard_bytes,
    }  # fmt: skip


def open_writer(output: Path, settings: Mapping[str, Any]) -> ShardWriter:
    """The writer, in the first process of a run; in others one that goes on from the same row. Raises ShardError."""
    writer = ShardWriter(output, settings) if is_first() else None
    mine = (0, 0) if writer is None else (writer.complete, writer.state.get("rows", 0))
    complete, done = from_first(np.array(mine, np.int32)).tolist()
    return writer or NoWriter(output, settings, bool(complete), {"rows": done})


def _load(args: argparse.Namespace, folder: Path) -> Target:
    size = args.tensor_parallel_size
    mesh = make_mesh(tensor=size) if size > 1 else None
    check_all_take_part(mesh, "--tensor-parallel-size")
    return load_target(folder, dtype=parse_dtype(args.dtype), mesh=mesh).model


# -------------------------------------------------------------------------------------------------------- room


def bytes_a_token(config: TargetConfig, num_aux: int, dtype: str) -> int:
    """Aux and hidden states, then token, top1, log_sum and mask."""
    return (num_aux + 1) * config.hidden_size * jnp.dtype(parse_dtype(dtype)).itemsize + 4 + 4 + 4 + 1


def check_room(output: Path, need: int) -> None:
    """Raises UserError if the disk has not `need` bytes left."""
    if need > (free := _free(output)):
        raise UserError(
            f"{output}: {_size(need)} are still to be written and only {_size(free)} are free; make room, prepare "
            "fewer rows, or train online, which stores nothing"
        )


def _free(output: Path) -> int:
    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    return shutil.disk_usage(place).free


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


# ------------------------------------------------------------------------------------------------------- files


def make_extract(target: Target, layers: Sequence[int]) -> Extract:
    """tokens [B, T] -> features on the host; compiled once for each bucket length."""
    graph, leaves, tree = split(target)
    dtype = target.embed_tokens.weight[...].dtype

    @jax.jit
    def compute(leaves: Any, tokens: jax.Array) -> Features:
        with matmul_precision(dtype):
            return target_features(join(graph, tree, leaves), tokens, layers, log_sum=True)

    def extract(tokens: np.ndarray) -> Features:
        found = to_host(compute(leaves, tokens))
        if len(found.aux) != len(layers):
            raise RuntimeError(f"the target gave {len(found.aux)} aux states, {len(layers)} were asked for")
        return found

    return extract


def write_features(
    rows: ShardFolder, extract: Extract, writer: ShardWriter, batch_size: int, shard_tokens: int, *, quiet: bool = False
) -> None:
    """Writes the shards that are missing."""
    done = int(writer.state.get("rows", 0))
    buckets = bucket_lengths(rows.settings["max_length"])
    told = sum(shard["tokens"] for shard in writer.shards)
    with tqdm(total=rows.num_tokens, initial=told, desc="features", unit="tok", unit_scale=True, disable=quiet) as bar:
        for group in grouped(islice(read_rows(rows.folder), done, None), shard_tokens):
            tensors = row_tensors(group) | shard_features(group, extract, writer.settings["aux_layers"], batch_size,
                                                          buckets, bar.update)  # fmt: skip
            done += len(group)
            writer.write(tensors, row_counts(group), {"rows": done})
    writer.finish({"rows": done})


def grouped(rows: Iterator[Row], num_tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows with at least `num_tokens` tokens together."""
    group, count = list[Row](), 0
    for row in rows:
        group.append(row)
        count += len(row.tokens)
        if count >= num_tokens:
            yield group
            group, count = [], 0
    if group:
        yield group


def shard_features(
    rows: Sequence[Row], extract: Extract, layers: Sequence[int], batch_size: int, buckets: Sequence[int],
    tell: Callable[[int], Any] = lambda _: None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The target's tensors for a shard of `rows`; rows of similar length are computed together."""
    starts = np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])])
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens))
    names = [*(f"aux.{layer}" for layer in layers), "hidden", "top1", "log_sum"]
    out: dict[str, np.ndarray] = {}
    batches = ordered_batches([rows[i] for i in order], batch_size=batch_size, buckets=buckets)
    for at, batch in zip(range(0, len(rows), batch_size), batches, strict=True):
        found = extract(batch.tokens)
        tensors: tuple[Any, ...] = (*found.aux, found.hidden, found.top1, found.log_sum)
        for name, values in zip(names, tensors, strict=True):
            whole = out.setdefault(name, np.zeros((int(starts[-1]), *values.shape[2:]), values.dtype))
            for i, value in zip(order[at : at + batch_size], values, strict=False):
                whole[starts[i] : starts[i + 1]] = value[: len(rows[i].tokens)]
        tell(batch.num_tokens)
    return out
