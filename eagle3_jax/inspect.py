"""`eagle3 inspect`: what a folder holds, from its config and the headers of its files; no weight is loaded."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from eagle3_jax.checkpoint.draft_formats import FLAGS, DraftFolder, boundaries, describe, draft_config
from eagle3_jax.checkpoint.drafter import EMBEDDING, TABLES
from eagle3_jax.checkpoint.fill import make_plan
from eagle3_jax.checkpoint.hf import NamedTensors, is_drafter, name_tensors, parameters_of, read_config, size
from eagle3_jax.checkpoint.layout import EVERY_FAMILY, Parameter, rules_for
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.source import Source, has_weights, open_source, read_json, resolve
from eagle3_jax.checkpoint.stop_ids import stop_ids
from eagle3_jax.checkpoint.vocab_map import read_vocab_map
from eagle3_jax.config import DELTA, FULL, TargetConfig, default_aux_layers
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import ConfigError
from eagle3_jax.precision import ALWAYS_FLOAT32
from eagle3_jax.target import Target

Line = tuple[str, str]
KINDS = {DELTA: "delta", FULL: "attention"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `eagle3 inspect`."""
    parser.add_argument("folder", help="folder of a target or a drafter, or a hub id (its weights are not downloaded)")
    parser.add_argument("--target", help="for a drafter: the target it is for, to check one against the other")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def run(args: argparse.Namespace) -> int:
    """Prints the description; problems of the folder follow as an error."""
    folder = resolve(args.folder, args.revision, weights=False)
    raw = read_json(folder, "config.json", required=True)
    source = open_source(folder) if has_weights(folder) else None
    if is_drafter(raw):
        lines, problems = inspect_drafter(folder, raw, source, _target_config(args.target))
    else:
        lines, problems = inspect_target(folder, raw, source)
    width = max(len(label) for label, _ in lines)
    print("\n".join(f"{label:{width}}  {text}" for label, text in lines), flush=True)
    if problems:
        raise CheckpointError(folder, problems)
    return 0


def _target_config(path_or_id: str | None) -> TargetConfig | None:
    if path_or_id is None:
        return None
    folder = resolve(path_or_id, weights=False)
    return read_config(read_json(folder, "config.json", required=True), folder)


def inspect_target(folder: Path, raw: Mapping[str, Any], source: Source | None) -> tuple[list[Line], list[str]]:
    """Lines that describe a target, and what is wrong with its tensors."""
    config = read_config(raw, folder)
    parameters = parameters_of(nnx.split(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))[1])
    named = name_tensors(source, config) if source is not None else None
    stops, notes = stop_ids(folder)
    lines = [
        ("target", f"{config.model_type} ({', '.join(raw.get('architectures') or ['no architecture named'])})"),
        ("layers", f"{config.num_layers}: {layer_pattern(config.layer_types)}"),
        ("attention", _attention(config)),
        *_delta(config),
        ("feed-forward", _feed_forward(config)),
        (
            "vocabulary",
            f"{config.vocab_size} tokens" + (", output tied to the embedding" if config.tie_word_embeddings else ""),
        ),
        (
            "context",
            f"{config.max_position_embeddings} tokens, rope theta {config.rope.theta:g} ({config.rope.scaling})",
        ),
        ("parameters", _parameters(config, parameters)),
        ("memory", memory(parameters)),
        ("files", _files(named, source)),
        ("aux layers", _default_aux(config.num_layers)),
        ("stop ids", ", ".join(map(str, stops)) or "none"),
        *[("note", note) for note in notes],
    ]
    if named is None:
        return lines, []
    plan = make_plan(parameters, named.tensors, rules_for(config), named.full_name)
    return lines, [*named.problems, *plan.problems]


def layer_pattern(layer_types: tuple[str, ...]) -> str:
    """The shortest repeated pattern, such as "(3 delta + 1 attention) x 8"; what does not repeat is spelled out."""
    count = len(layer_types)
    period = next(p for p in range(1, count + 1) if count % p == 0 and layer_types[:p] * (count // p) == layer_types)
    runs = [f"{len(list(group))} {KINDS[kind]}" for kind, group in groupby(layer_types[:period])]
    if len(runs) == 1:
        return f"{count} {KINDS[layer_types[0]]}"
    return " + ".join(runs) if period == count else f"({' + '.join(runs)}) x {count // period}"


def _attention(config: TargetConfig) -> str:
    marks = (("q/k norms", config.qk_norm), ("output gate", config.attn_output_gate), ("biases", config.attention_bias))
    extras = "".join(f", {text}" for text, on in marks if on)
    return f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for keys and values{extras}"


def _delta(config: TargetConfig) -> list[Line]:
    layers = config.layer_types.count(DELTA)
    if not layers:
        return []
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    state = layers * values * config.linear_key_head_dim * config.linear_value_head_dim * 4
    heads = f"{keys} key heads of {config.linear_key_head_dim}, {values} value heads of {config.linear_value_head_dim}"
    return [("delta rule", f"{heads}, state {size(state)} a sequence")]


def _feed_forward(config: TargetConfig) -> str:
    sparse = sum(config.moe_layers)
    dense = f"width {config.hidden_size} -> {config.intermediate_size}"
    if not sparse:
        return dense
    shared = config.shared_expert_intermediate_size
    text = f"{config.num_experts} experts of {config.moe_intermediate_size}, {config.num_experts_per_tok} a token"
    text += f", and a shared one of {shared}" if shared else ""
    return text if sparse == config.num_layers else f"{text} in {sparse} layers; elsewhere {dense}"


def _parameters(config: TargetConfig, parameters: Iterable[Parameter]) -> str:
    total = sum(math.prod(p.shape) for p in parameters)
    experts = sum(math.prod(p.shape) for p in parameters if ".experts." in p.path)
    if not experts:
        return count(total)
    active = total - experts + experts * config.num_experts_per_tok // config.num_experts
    return f"{count(total)}, {count(active)} of them active for a token"


def memory(parameters: Sequence[Parameter]) -> str:
    """Bytes of the weights in each dtype; some parameters stay float32 in both."""
    elements = sum(math.prod(p.shape) for p in parameters)
    kept = sum(math.prod(p.shape) for p in parameters if p.path.rsplit(".", 1)[-1] in ALWAYS_FLOAT32)
    return f"bfloat16 {size(2 * elements + 2 * kept)}, float32 {size(4 * elements)}"


def _files(named: NamedTensors | None, source: Source | None) -> str:
    if named is None or source is None:
        return "no weights here"
    kinds = {str(info.dtype) for info in named.tensors.values()}
    total, files = sum(info.nbytes for info in source), {info.file for info in source}
    text = f"{len(source.tensors)} tensors, {size(total)} of {', '.join(sorted(kinds))} in {len(files)} files"
    return f"{text}; {named.skipped}" if named.skipped else text


def _default_aux(num_layers: int) -> str:
    try:
        return f"{list(default_aux_layers(num_layers))} by default (boundaries: what enters a layer)"
    except ConfigError as error:
        return str(error)


def count(number: int) -> str:
    """A number of parameters as people say it."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def inspect_drafter(
    folder: Path, raw: Mapping[str, Any], source: Source | None, target: TargetConfig | None
) -> tuple[list[Line], list[str]]:
    """Lines that describe a drafter, and what is wrong with it; with a target, its tensors are checked too."""
    found = describe(raw, source or ())
    layer = found.layer
    heads = layer.get("num_attention_heads") or 0
    lines = [
        ("drafter", f"{found.format} format: {found.why}"),
        ("layers", f"{layer.get('num_hidden_layers') or 1}, width {layer.get('hidden_size')}"),
        ("attention", f"{heads} heads, {layer.get('num_key_value_heads') or heads} for keys and values"),
        ("feed-forward", f"width {layer.get('hidden_size')} -> {layer.get('intermediate_size')}"),
        ("flags", ", ".join(flag for flag in FLAGS if found.flag(flag)) or "none"),
        ("aux layers", _aux(found, target)),
        ("vocabulary", _vocabulary(found)),
        ("context", f"{layer.get('max_position_embeddings')} tokens"),
        ("files", _drafter_files(found, source)),
    ]
    problems = list(found.problems) if source is not None else []
    if target is None or found.foreign:
        return lines, problems
    config, more, notes = draft_config(found, target)
    problems += more
    if config is not None and source is not None:
        parameters = parameters_of(nnx.split(nnx.eval_shape(lambda: Eagle3(config, rngs=nnx.Rngs(0))))[1])
        kept = {n: t for n, t in found.tensors.items() if n not in TABLES and (n != EMBEDDING or config.own_embedding)}
        problems += make_plan(parameters, kept, EVERY_FAMILY, found.full_name).problems
        lines += [("parameters", _parameters_of_head(parameters)), ("memory", memory(parameters))]
    return [*lines, *[("note", note) for note in notes]], list(dict.fromkeys(problems))


def _parameters_of_head(parameters: Sequence[Parameter]) -> str:
    return count(sum(math.prod(p.shape) for p in parameters))


def _aux(found: DraftFolder, target: TargetConfig | None) -> str:
    meaning = "boundaries" if found.aux_offset == 0 else "layer outputs"
    if found.aux_ids is None:
        if target is None:
            return "not in config.json: the default boundaries (2, L//2, L-3) of its target of L layers"
        return f"not in config.json: {_default_aux(target.num_layers)}"
    ids = [i + found.aux_offset for i in found.aux_ids]
    text = f"boundaries {ids}; config.json has {list(found.aux_ids)}, which are {meaning} in this format"
    if target is None:
        return text
    try:
        boundaries(found, target)
    except ConfigError as error:
        return f"{text}; {error}"
    return text


def _vocabulary(found: DraftFolder) -> str:
    total = found.layer.get("vocab_size") or 0
    rows = found.tensors.get("lm_head.weight")
    draft = found.raw.get("draft_vocab_size") or (rows.shape[0] if rows else total)
    text = f"{draft} of {total} tokens"
    if "d2t" not in found.tensors:
        return f"{text}, no d2t"
    d2t, t2d = (found.tensors[name].read() if name in found.tensors else None for name in TABLES)
    mapping = read_vocab_map(d2t, t2d, draft, total)
    if mapping.problems:
        return f"{text}: {'; '.join(mapping.problems)}"
    ids = np.asarray(mapping.targets)
    checked = "checked with t2d" if t2d is not None else "no t2d"
    return f"{text}, d2t holds {mapping.how} ids from {ids.min()} to {ids.max()}, {checked}"


def _drafter_files(found: DraftFolder, source: Source | None) -> str:
    if source is None:
        return "no weights here"
    embedding = "with" if EMBEDDING in found.tensors else "without"
    return f"{len(source.tensors)} tensors, {size(sum(info.nbytes for info in source))}, {embedding} an embedding"
