"""`eagle3 check`: one text through transformers and through this library, compared layer by layer.

Real weights differ from the random ones of the tests; with this a user can prove the model at hand. Both run in float32
on the CPU, one after the other, so that only one of them is in memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.checkpoint.block_fp8 import stored_block
from eagle3_jax.checkpoint.hf import cut, load_target, read_config
from eagle3_jax.checkpoint.source import read_json, resolve
from eagle3_jax.config import DELTA, TargetConfig
from eagle3_jax.errors import UserError
from eagle3_jax.precision import join, matmul_precision, split

TEXT = "The quick brown fox jumps over the lazy dog. def add(a, b): return a + b  # 1 + 2 = 3"
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
TOLERANCE = 1e-4

Host = np.ndarray[Any, Any]


class Trace(NamedTuple):
    """What a model computes for one text: boundaries 0..L [T,D], the final hidden states [T,D] and logits [T,V]."""

    boundaries: tuple[Host, ...]
    hidden: Host
    logits: Host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `eagle3 check`."""
    parser.add_argument("target", help="folder of a target, or a hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--reference", help="run transformers on this folder instead: to compare a copy with its original"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--text", help="text to run (default: a short one of words, code and digits)")
    chosen.add_argument("--token-ids", help="token ids to run, separated by commas; needs no tokenizer")
    parser.add_argument("--num-layers", type=int, help="compare only the first layers, of a model too large as a whole")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative error that is a divergence")


def run(args: argparse.Namespace) -> int:
    """0 when everything agrees, 1 at a divergence."""
    _need_transformers()
    folder = resolve(args.target, args.revision)
    reference = resolve(args.reference) if args.reference else folder
    raw = read_json(folder, "config.json", required=True)
    if stored_block(raw, folder) and not args.reference:
        raise UserError(f"{folder}: the checkpoint is fp8: name its original with --reference, and a wider --tolerance")
    config = cut(read_config(raw, folder), args.num_layers)
    tokens = choose_tokens(folder, config, args.text, args.token_ids)
    ours = our_trace(folder, tokens, args.num_layers)
    gc.collect()
    theirs = their_trace(reference, tokens, args.num_layers)
    rows = compare(ours, theirs, config)
    print(table(rows, args.tolerance))
    agreeing = int(np.sum(ours.logits.argmax(-1) == theirs.logits.argmax(-1)))
    print(f"most likely next token: the same at {agreeing} of {len(tokens)} positions")
    return verdict(rows, args.tolerance)


def _need_transformers() -> None:
    if absent := [name for name in ("torch", "transformers") if not _installed(name)]:
        raise UserError(f"eagle3 check needs {' and '.join(absent)}: pip install 'eagle3-jax[test]'")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that is being kept from import
        return False


def choose_tokens(folder: Path, config: TargetConfig, text: str | None, token_ids: str | None) -> list[int]:
    """Ids to run: those given, those of the text, or a fixed sequence for a folder without a tokenizer."""
    if token_ids is not None:
        ids = _parse_ids(token_ids)
    elif any((folder / name).is_file() for name in TOKENIZERS):
        from transformers import AutoTokenizer

        ids = list(AutoTokenizer.from_pretrained(folder)(text or TEXT)["input_ids"])
    elif text is not None:
        raise UserError(f"{folder} has no tokenizer for --text; give --token-ids")
    else:
        ids = [int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, 24)]
        print(f"no tokenizer in the folder: {len(ids)} random tokens are compared")
    if not ids or not all(0 <= i < config.vocab_size for i in ids):
        raise UserError(f"token ids must be between 0 and {config.vocab_size - 1}, and at least one: {ids}")
    return ids


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--token-ids takes numbers separated by commas, not {text!r}") from None


def our_trace(folder: Path, tokens: Sequence[int], num_layers: int | None = None) -> Trace:
    """Runs this library, in float32 at the highest precision, on the CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]), matmul_precision(jnp.float32):
        model = load_target(folder, dtype="float32", num_layers=num_layers).model
        graph, leaves, tree = split(model)
        every = tuple(range(model.config.num_layers + 1))

        @jax.jit
        def forward(leaves: Any, ids: jax.Array) -> Any:
            merged = join(graph, tree, leaves)
            out = merged(ids, aux_layers=every)
            return out.aux, out.hidden, merged.logits(out.hidden)

        aux, hidden, logits = forward(leaves, jnp.asarray([tokens], jnp.int32))
        return Trace(tuple(np.asarray(x[0]) for x in aux), np.asarray(hidden[0]), np.asarray(logits[0]))


def their_trace(folder: Path, tokens: Sequence[int], num_layers: int | None = None) -> Trace:
    """Runs transformers, in float32 on the CPU; hooks see what enters each layer and the final norm."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # reports of kernels that are not installed, of layers left out
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    if num_layers is not None:
        text.num_hidden_layers, text.layer_types = num_layers, text.layer_types[:num_layers]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    decoder = model.get_decoder()
    seen: list[Host] = []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0].numpy().copy())

    hooks = [m.register_forward_pre_hook(see, with_kwargs=True) for m in (*decoder.layers, decoder.norm)]
    last: list[Host] = []
    hooks.append(decoder.norm.register_forward_hook(lambda m, a, out: last.append(out[0].numpy().copy())))
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return Trace(tuple(seen), last[0], logits)


class Row(NamedTuple):
    """One comparison: its place, what computes it, and the relative error."""

    place: str
    made_by: str
    error: float


def compare(ours: Trace, theirs: Trace, config: TargetConfig) -> list[Row]:
    """Relative errors in the order in which a model computes.

    Raises:
      UserError: the two models have not the same number of layers.
    """
    if len(ours.boundaries) != len(theirs.boundaries):
        raise UserError(f"{len(ours.boundaries) - 1} layers here, {len(theirs.boundaries) - 1} in the reference")
    kinds = ["delta rule" if kind == DELTA else "attention" for kind in config.layer_types]
    makers = ["token embedding", *(f"layer {i} ({kind})" for i, kind in enumerate(kinds))]
    places = [*(f"boundary {b}" for b in range(len(makers))), "hidden", "logits"]
    pairs = zip((*ours.boundaries, *ours[1:]), (*theirs.boundaries, *theirs[1:]), strict=True)
    errors = [relative_error(a, b) for a, b in pairs]
    return [Row(*row) for row in zip(places, [*makers, "final norm", "output projection"], errors, strict=True)]


def relative_error(ours: Host, theirs: Host) -> float:
    """Root mean square of the difference over that of `theirs`; infinite for NaN or another shape."""
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return float("inf")
    difference = float(np.linalg.norm((ours - theirs).astype(np.float64)))
    return difference / max(float(np.linalg.norm(theirs.astype(np.float64))), 1e-30)


def table(rows: Sequence[Row], tolerance: float) -> str:
    """The comparison for the terminal."""
    first, second = max(len(row.place) for row in rows), max(len(row.made_by) for row in rows)
    head = f"{'place':{first}}  {'made by':{second}}  relative error"
    lines = [f"{r.place:{first}}  {r.made_by:{second}}  {r.error:.2e}{'  <--' * (r.error > tolerance)}" for r in rows]
    return "\n".join([head, *lines])


def verdict(rows: Sequence[Row], tolerance: float) -> int:
    """Prints the outcome and returns the exit status."""
    wrong = next((row for row in rows if row.error > tolerance), None)
    if wrong is None:
        print(f"agrees with transformers: every relative error is at most {tolerance:g}")
        return 0
    print(f"diverges from transformers, first in {wrong.made_by}: relative error {wrong.error:.2e} at {wrong.place}")
    return 1
