"""`eagle3 convert`: a head from any format into any other, bit for bit, and what was understood of it."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from eagle3_jax.checkpoint.formats import FORMATS, Choices, Head, Written, read_head, write_head
from eagle3_jax.checkpoint.formats.head import EMBEDDING, FLAGS, Convention
from eagle3_jax.checkpoint.formats.tensors import Rows, embedding_note
from eagle3_jax.checkpoint.hf import size
from eagle3_jax.checkpoint.safetensors_file import TensorInfo
from eagle3_jax.checkpoint.source import read_json, resolve
from eagle3_jax.errors import UserError
from eagle3_jax.inspect import Line, target_of

MEANING = {"boundary": "boundaries", "output": "layer outputs"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `eagle3 convert`."""
    parser.add_argument("source", metavar="SRC", help="folder of a head in any format, or a hub id")
    parser.add_argument("destination", metavar="DST", help="folder to write; it appears when it is complete")
    parser.add_argument("--to", required=True, choices=sorted(FORMATS), help="format to write")
    parser.add_argument("--verifier", metavar="NAME", help="name of the target, recorded in speculators' format")
    parser.add_argument("--target", help="folder or hub id of the target, to check against and to fill defaults from")
    parser.add_argument(
        "--aux-layers",
        type=_numbers,
        metavar="A,B,C",
        help="aux layers instead of SRC's: boundaries (what enters a layer)",
    )
    parser.add_argument(
        "--aux-convention",
        choices=("auto", "boundary", "output", "keep"),
        default="auto",
        help="what ids mean: what SRC's format means (auto), boundaries, layer outputs; keep writes the same numbers",
    )
    parser.add_argument("--rope-theta", type=float, help="theta instead of SRC's")
    parser.add_argument("--vocab-map", choices=("offset", "absolute"), help="how to read a d2t that fits both")
    parser.add_argument("--drop-keys", type=_words, default=(), metavar="K,L", help="unknown keys that may be left out")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.replace("[", "").replace("]", "").split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Converts, and prints a summary."""
    source, destination = resolve(args.source, args.revision), Path(args.destination)
    _check_destination(source, destination, args.overwrite)
    target, embed = target_of(args.target)
    overrides = {} if args.rope_theta is None else {"rope_theta": args.rope_theta}
    convention: Convention | None = None if args.aux_convention == "auto" else args.aux_convention
    if args.aux_convention == "keep":
        convention = FORMATS[args.to].convention
    head = read_head(source, target, Choices(args.aux_layers, convention, args.vocab_map, overrides))
    head = _named(head, args)
    written = write_head(head, destination, args.to, drop=args.drop_keys)
    lines = summary(head, written, destination, args.to, chosen=_chosen(args))
    lines += _embedding_lines(head, embed, args.target)
    width = max(len(label) for label, _ in lines)
    print("\n".join(f"{label:{width}}  {text}" for label, text in lines), flush=True)
    return 0


def _check_destination(source: Path, destination: Path, overwrite: bool) -> None:
    inside, outer = destination.resolve(), source.resolve()
    if inside == outer or inside in outer.parents:
        raise UserError(f"{destination}: DST is SRC, or a folder that SRC is in")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UserError(f"{destination}: exists and is not a folder")
    if destination.is_dir() and any(destination.iterdir()) and not overwrite:
        raise UserError(f"{destination}: exists; --overwrite replaces its config.json and weights")


def _named(head: Head, args: argparse.Namespace) -> Head:
    """The head with its target named: by --verifier, else --target, else as its folder has it."""
    name = args.verifier or args.target or head.verifier
    known = args.target or (name if name and (Path(name) / "config.json").is_file() else None)
    raw = read_json(resolve(known, weights=False), "config.json") if known else {}
    architectures = tuple(raw.get("architectures") or ())
    if not architectures and name == head.verifier:
        architectures = head.verifier_architectures
    return dataclasses.replace(head, verifier=name, verifier_architectures=architectures)


def _chosen(args: argparse.Namespace) -> str:
    parts = []
    if args.aux_layers is not None:
        parts.append(f"--aux-layers {','.join(map(str, args.aux_layers))}")
    if args.aux_convention != "auto":
        parts.append(f"--aux-convention {args.aux_convention}")
    return " ".join(parts)


def summary(head: Head, written: Written, destination: Path, to: str, chosen: str = "") -> list[Line]:
    """What was read, what was written, and what was made of the rest."""
    flags = [flag for flag in (*FLAGS, "qk_norm") if getattr(head.config, flag)]
    lines = [
        ("read", f"{head.format} format: {head.why}"),
        ("written", f"{destination}, {to} format: {written.num_tensors} tensors, {size(written.num_bytes)}"),
        ("weights", f"unchanged, {head.dtype}"),
        ("aux layers", aux_text(head, to, chosen)),
        ("flags", ", ".join(flags) or "none"),
        ("vocabulary", f"{head.config.draft_vocab_size} of {head.config.vocab_size} tokens"),
        ("rope", f"theta {head.config.rope.theta:g} ({head.config.rope.scaling})"),
        ("verifier", head.verifier or "not named"),
    ]
    lines += [("warning", text) for text in (*head.warnings, *written.remarks)]
    return lines + [("note", text) for text in head.notes]


def aux_text(head: Head, to: str, chosen: str) -> str:
    """The ids as DST has them, what they mean there, and the ids that they come from."""
    if head.aux_layers is None:
        return "not named in SRC, nor in DST: the default boundaries (2, L//2, L-3) are meant"
    kind = FORMATS[to]
    ids = [b - (kind.convention == "output") for b in head.aux_layers]
    text = f"{ids} in DST, {MEANING[kind.convention]} in {to} format"
    if to == "eagle":
        text = f"not named in DST, boundaries {list(head.aux_layers)} are the default"
    if kind.convention == "output":
        text += f" (boundaries {list(head.aux_layers)})"
    if chosen:
        text += f"; by {chosen}"
    origin = head.origin
    if origin is None or origin.aux_ids is None:
        return f"{text}; SRC names none"
    return f"{text}; SRC has {list(origin.aux_ids)}, {MEANING[origin.convention]} in {origin.format} format"


def _embedding_lines(head: Head, embed: Rows | None, target: str | None) -> list[Line]:
    info = head.tensors.get(EMBEDDING)
    if head.config.own_embedding or not isinstance(info, TensorInfo) or (embed is None and target is None):
        return []
    text, warn = embedding_note(info, embed)
    return [("warning" if warn else "note", text)] if text else []
