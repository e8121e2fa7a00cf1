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

from eagle3_jax.checkpoint.block_fp8 import stored_block, with_scales
from eagle3_jax.checkpoint.fill import make_plan
from eagle3_jax.checkpoint.formats.head import EMBEDDING, FLAGS
from eagle3_jax.checkpoint.formats.read import Findings, examine
from eagle3_jax.checkpoint.formats.tensors import Rows, embedding_note, stored_shapes
from eagle3_jax.checkpoint.hf import NamedTensors, is_drafter, name_tensors, parameters_of, read_config, size
from eagle3_jax.checkpoint.layout import Parameter, rules_for
from eagle3_jax.checkpoint.placing import half_quantised
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.source import Source, has_weights, open_source, read_json, resolve
from eagle3_jax.checkpoint.stop_ids import stop_ids
from eagle3_jax.config import DELTA, FULL, TargetConfig, default_aux_layers
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
        target, embed = target_of(args.target)
        lines, problems = inspect_drafter(folder, raw, source, target, embed)
    else:
        lines, problems = inspect_target(folder, raw, source)
    width = max(len(label) for label, _ in lines)
    print("\n".join(f"{label:{width}}  {text}" for label, text in lines), flush=True)
    if problems:
        raise CheckpointError(folder, problems)
    return 0


def target_of(path_or_id: str | None) -> tuple[TargetConfig | None, Rows | None]:
    """The config of a target and, where its weights are here, its embedding, still in its file."""
    if path_or_id is None:
        return None, None
    folder = resolve(path_or_id, weights=False)
    config = read_config(read_json(folder, "config.json", required=True), folder)
    if not has_weights(folder):
        return config, None
    info = name_tensors(open_source(folder), config).tensors.get(EMBEDDING)
    return config, None if info is None else info.read()


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
    tensors, faults = with_scales(named.tensors, stored_block(raw, folder))
    plan = make_plan(parameters, tensors, rules_for(config), named.full_name)
    return lines, [*named.problems, *faults, *plan.problems, *half_quantised(plan)]


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
    folder: Path, raw: Mapping[str, Any], source: Source | None, target: TargetConfig | None, embed: Rows | None = None
) -> tuple[list[Line], list[str]]:
    """Lines that describe a drafter, and what is wrong with it; with a target, the two are compared."""
    found = examine(raw, source, target)
    config, sections = found.fields.config, found.sections
    layer = sections.layer
    heads = layer.get("num_attention_heads") or 0
    lines = [
        ("drafter", f"{found.format.name} format: {found.why}"),
        ("layers", f"{layer.get('num_hidden_layers') or 1}, width {layer.get('hidden_size')}"),
        ("attention", f"{heads} heads, {layer.get('num_key_value_heads') or heads} for keys and values"),
        ("feed-forward", f"width {layer.get('hidden_size')} -> {layer.get('intermediate_size')}"),
        ("flags", ", ".join(flag for flag in FLAGS if sections.flags[flag]) or "none"),
        ("aux layers", aux_line(found)),
        ("vocabulary", _vocabulary(found)),
        ("context", _context(found)),
        ("files", _drafter_files(found, source)),
    ]
    if config is not None:
        sizes = stored_shapes(config, embedding=config.own_embedding, tied=found.tied).values()
        elements = sum(math.prod(shape) for shape in sizes)
        lines += [("parameters", count(elements)), ("memory", _head_memory(elements))]
    if found.origin is not None and found.origin.format != found.format.name:
        lines.append(("converted from", f"{found.origin.format} format, aux ids {found.origin.aux_ids}"))
    warnings = list(found.warnings)
    if sections.unknown and not found.problems:
        warnings.append(f"config.json has keys that are not known here: {', '.join(sections.unknown)}")
    if EMBEDDING in found.tensors and not found.problems and embed is not None:
        text, _ = embedding_note(found.tensors[EMBEDDING], embed)
        warnings += [text] if text else []
    notes = [("note", text) for text in (found.notes if config is not None else [])]
    return [*lines, *[("warning", text) for text in warnings], *notes], found.problems


def _head_memory(elements: int) -> str:
    return f"bfloat16 {size(2 * elements)}, float32 {size(4 * elements)}"


def aux_line(found: Findings) -> str:
    """The boundaries, and how they follow from what config.json has."""
    ids, boundaries = found.sections.aux_ids, found.fields.aux_layers
    if ids is None and boundaries is None:
        return "not in config.json: the default boundaries (2, L//2, L-3) of its target of L layers"
    if ids is None:
        return f"not in config.json: {list(boundaries or ())} by default (boundaries: what enters a layer)"
    meaning = "boundaries" if found.sections.convention == "boundary" else "layer outputs"
    shown = "not usable" if boundaries is None else f"boundaries {list(boundaries)}"
    return f"{shown}; config.json has {list(ids)}, which are {meaning} in this format"


def _vocabulary(found: Findings) -> str:
    config, mapping = found.fields.config, found.vocab
    if config is None:
        return f"{found.sections.draft_vocab_size} of {found.sections.layer.get('vocab_size')} tokens"
    text = f"{config.draft_vocab_size} of {config.vocab_size} tokens"
    if mapping is None or "d2t" not in found.tensors:
        return f"{text}, no d2t"
    if mapping.problems:
        return f"{text}: {'; '.join(mapping.problems)}"
    ids = np.asarray(mapping.targets)
    checked = "checked with t2d" if "t2d" in found.tensors else "no t2d"
    return f"{text}, d2t holds {mapping.how} ids from {ids.min()} to {ids.max()}, {checked}"


def _context(found: Findings) -> str:
    config = found.fields.config
    tokens = f"{found.sections.layer.get('max_position_embeddings')} tokens"
    return tokens if config is None else f"{tokens}, rope theta {config.rope.theta:g} ({config.rope.scaling})"


def _drafter_files(found: Findings, source: Source | None) -> str:
    if source is None:
        return "no weights here"
    embedding = "with" if EMBEDDING in found.tensors else "without"
    return f"{len(source.tensors)} tensors, {size(sum(info.nbytes for info in source))}, {embedding} an embedding"
