"""A folder of any format, understood: config, tensors, and everything that is wrong with it, told at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.formats import angelslim, eagle, modelopt, native, specforge, speculators
from eagle3_jax.checkpoint.formats.fields import AS_READ, Choices, Fields, read_fields
from eagle3_jax.checkpoint.formats.head import EMBEDDING, OUTPUT, Format, Head, Origin, Sections, Tensor
from eagle3_jax.checkpoint.formats.keys import architectures
from eagle3_jax.checkpoint.formats.tensors import name_problems, named, tensor_problems, vocabulary
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.safetensors_file import Outgoing, TensorInfo
from eagle3_jax.checkpoint.source import open_source, read_json, resolve
from eagle3_jax.checkpoint.vocab_map import VocabMap, as_offsets
from eagle3_jax.config import TargetConfig

# The order in which they are tried: what marks a format most clearly comes first, what is left is EAGLE's.
FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT for module in (native, speculators, modelopt, angelslim, specforge, eagle)
}
PLAIN = (
    "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
    "Eagle3",
)  # fmt: skip
OTHER_METHODS = ("dflash_config", "mask_token_id", "markov_rank", "mtp_num_layers")


@dataclasses.dataclass
class Findings:
    """All that a folder says, also when it is not fit for use: then `problems` says why."""

    format: Format
    why: str
    raw: Mapping[str, Any]
    sections: Sections
    tensors: dict[str, TensorInfo]
    fields: Fields
    foreign: bool
    tied: bool
    vocab: VocabMap | None
    origin: Origin | None
    problems: list[str]
    warnings: list[str]
    notes: list[str]


def recognise(raw: Mapping[str, Any], names: Iterable[str]) -> tuple[Format, str]:
    """The format of a folder and the reason: what only it writes."""
    names = tuple(names)
    return next((kind, why) for kind in FORMATS.values() if (why := kind.recognise(raw, names)))


def examine(
    raw: Mapping[str, Any],
    tensors: Iterable[TensorInfo] | None,
    target: TargetConfig | None = None,
    choices: Choices = AS_READ,
) -> Findings:
    """Reads config.json and the headers of the tensors (None: there are none here, and nothing is said of them)."""
    table, left_out, twice = named(tensors or ())
    kind, why = recognise(raw, [info.name for info in table.values()])
    sections = kind.sections(raw)
    origin = _origin(kind, raw, sections, table)
    if kind is native.FORMAT and origin is not None and origin.format in FORMATS:
        first = FORMATS[origin.format].sections(origin.config)
        sections = dataclasses.replace(sections, carried=first.carried, unknown=(*sections.unknown, *first.unknown))
    foreign = _foreign(raw, None if tensors is None else table)
    fields = read_fields(sections, table, target, choices)
    found = Findings(
        kind, why, raw, sections, table, fields, bool(foreign), False, None, origin,
        [*twice, *foreign, *sections.problems, *fields.problems], [*sections.warnings, *fields.warnings], fields.notes,
    )  # fmt: skip
    if left_out:
        found.notes.append(f"left out, not part of a head: {', '.join(left_out)}")
    if tensors is not None and not foreign:
        _check_tensors(found, choices)
    if found.problems and not foreign:
        found.problems += [f"config.json: unknown key {key}" for key in sections.unknown]
    found.problems = list(dict.fromkeys(found.problems))
    return found


def _origin(kind: Format, raw: Mapping[str, Any], sections: Sections, table: Mapping[str, TensorInfo]) -> Origin | None:
    if kind is native.FORMAT:
        return native.origin_of(raw)
    names = {name: info.name for name, info in table.items()}
    return Origin(kind.name, raw, names, sections.aux_ids, sections.convention)


def _foreign(raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> list[str]:
    """Why this is not an EAGLE-3 head at all; its tensors then need no comment."""
    method = raw.get("speculators_model_type", "eagle3")
    names = architectures(raw)
    if method != "eagle3" or any(key in raw for key in OTHER_METHODS):
        return [f"this is a {method if method != 'eagle3' else ', '.join(names)} drafter, not an EAGLE-3 head"]
    if other := [n for n in names if n not in PLAIN]:
        return [f"architecture {', '.join(other)} is not supported; supported are {', '.join(PLAIN)}"]
    if tensors is not None and "fc.weight" not in tensors:
        return ["no fc.weight: this is not the folder of an EAGLE-3 head"]
    if tensors is not None and "layers.0.hidden_norm.weight" not in tensors:
        return ["no hidden_norm: this looks like an EAGLE-1 or EAGLE-2 head, which is not supported"]
    return []


def _check_tensors(found: Findings, choices: Choices) -> None:
    config = found.fields.config
    if config is None:
        found.problems += name_problems(found.tensors)
        return
    found.tied = found.sections.tied and OUTPUT not in found.tensors
    if found.tied and (EMBEDDING not in found.tensors or config.draft_vocab_size != config.vocab_size):
        found.problems.append(f"tied without {OUTPUT}: it needs {EMBEDDING} here and a draft vocabulary of every token")
    elif OUTPUT not in found.tensors and not found.tied:
        found.notes.append(f"without {OUTPUT} some programs take the target's: copy it into the folder")
    elif found.sections.tied and not found.tied:
        found.notes.append(f"tie_word_embeddings is set, but {OUTPUT} is there and is used")
    found.problems += tensor_problems(found.tensors, config, tied=found.tied)
    found.vocab = vocabulary(found.tensors, config, choices.vocab_map)
    found.problems += found.vocab.problems
    if found.vocab.how == "absolute" and not found.vocab.problems and not _identity(found.vocab):
        found.notes.append("d2t holds absolute ids; offsets are written")


def _identity(vocab: VocabMap) -> bool:
    return np.array_equal(vocab.targets, np.arange(len(vocab.targets)))


def read_head(
    path_or_id: str | Path,
    target: TargetConfig | None = None,
    choices: Choices = AS_READ,
    *,
    revision: str | None = None,
) -> Head:
    """A head from a folder or hub id. No weight is read before it is asked for, and no device is used.

    Args:
      target: the target's config, to check against and to take default aux layers and the context from.

    Raises:
      CheckpointError: with every problem of the folder.
    """
    folder = resolve(path_or_id, revision)
    raw = read_json(folder, "config.json", required=True)
    found = examine(raw, open_source(folder), target, choices)
    if found.problems:
        raise CheckpointError(folder, found.problems)
    return head_of(found, target)


def head_of(found: Findings, target: TargetConfig | None) -> Head:
    """The head of findings without problems."""
    config, vocab, sections = found.fields.config, found.vocab, found.sections
    assert config is not None and vocab is not None and not found.problems
    tensors: dict[str, Tensor] = dict(found.tensors)
    if vocab.how == "absolute" and "d2t" in tensors:
        offsets = as_offsets(vocab.targets, config.vocab_size)[0]
        tensors["d2t"] = Outgoing(offsets.dtype, offsets.shape, lambda: offsets)
    return Head(
        config, found.fields.aux_layers, tensors, vocab, format=found.format.name, why=found.why, raw=found.raw,
        origin=found.origin, tied=found.tied,
        num_target_layers=target.num_layers if target else sections.num_target_layers, verifier=sections.verifier,
        verifier_architectures=sections.verifier_architectures, carried=sections.carried,
        unknown_keys=sections.unknown, warnings=tuple(found.warnings), notes=tuple(found.notes),
    )  # fmt: skip
