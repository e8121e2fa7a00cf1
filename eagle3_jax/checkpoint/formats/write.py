"""A head into a folder of any format, tensor by tensor and bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.formats.fields import read_fields
from eagle3_jax.checkpoint.formats.head import OUTPUT, Format, Head, Tensor, array_of
from eagle3_jax.checkpoint.formats.read import FORMATS
from eagle3_jax.checkpoint.formats.tensors import is_finite
from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.publish import publish, write_json
from eagle3_jax.checkpoint.safetensors_file import Outgoing, TensorInfo, write_file
from eagle3_jax.checkpoint.source import SINGLE
from eagle3_jax.checkpoint.vocab_map import as_offsets
from eagle3_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Written:
    """What was written: config.json, the tensors' names with their sizes, and remarks on what others make of it."""

    config: dict[str, Any]
    num_tensors: int
    num_bytes: int
    remarks: tuple[str, ...]


def write_head(
    head: Head, folder: str | Path, format: str, *, drop: Iterable[str] = (), extra: Mapping[str, Any] | None = None
) -> Written:
    """Writes config.json and model.safetensors; the folder appears complete or not at all.

    A head that goes back into the format that it came from gets its own config.json and names again, changed only
    where the head was.

    Args:
      drop: unknown keys of config.json that may be left out.
      extra: further keys of config.json.

    Raises:
      ConfigError: the head has something that the format has no words for; every such thing is named.
      CheckpointError: weights that are NaN or infinite.
    """
    kind = FORMATS[format]
    first = _as_first_read(head, kind)
    if missing := inexpressible(head, kind, first, drop):
        raise ConfigError(f"{kind.title} cannot express this head: {'; '.join(missing)}")
    config = kind.config(head)
    if first is not None and head.origin is not None:
        config = _patched(head.origin.config, kind.config(first), config)
    tensors, bad = _outgoing(head, kind, first is not None)
    config |= extra or {}
    with publish(folder) as fresh:
        write_file(fresh / SINGLE, tensors)
        if bad:
            raise CheckpointError(folder, [f"not written: {name} holds NaN or infinite values" for name in bad])
        write_json(fresh / "config.json", config)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Written(config, len(tensors), size, tuple(kind.remarks(head)))


def inexpressible(head: Head, kind: Format, first: Head | None = None, drop: Iterable[str] = ()) -> list[str]:
    """What of the head is lost in a format. What it said of itself in the same format it can say again."""
    before = kind.cannot(first) if first is not None else []
    found = [text for text in kind.cannot(head) if text not in before]
    if first is None and kind.name != "native":
        unknown = [key for key in head.unknown_keys if key not in set(drop)]
        found += [f"the key {key} of config.json, which is not known here and can only be dropped" for key in unknown]
    return found


def _as_first_read(head: Head, kind: Format) -> Head | None:
    """The head as its own config.json has it, when that was of the format `kind`."""
    origin = head.origin
    if origin is None or origin.format != kind.name:
        return None
    sections = kind.sections(origin.config)
    infos = {name: t for name, t in head.tensors.items() if isinstance(t, TensorInfo)}
    fields = read_fields(sections, infos, None)
    if fields.config is None:
        return None
    return dataclasses.replace(
        head, config=fields.config, aux_layers=fields.aux_layers, tied=sections.tied and OUTPUT not in head.tensors,
        num_target_layers=None, verifier=sections.verifier, verifier_architectures=sections.verifier_architectures,
        carried=sections.carried,
    )  # fmt: skip


def _patched(base: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the differences between `old` and `new`, and nothing else, applied."""
    out = dict(base)
    for key in {**old, **new}:
        was, now = old.get(key), new.get(key)
        if was == now:
            continue
        if isinstance(was, Mapping) and isinstance(now, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = _patched(out[key], was, now)
        elif key in new:
            out[key] = now
        else:
            out.pop(key, None)
    return out


def _outgoing(head: Head, kind: Format, same: bool) -> tuple[dict[str, Outgoing], list[str]]:
    """Tensors under the format's names, and a list that fills with those found not finite while being written."""
    bad: list[str] = []
    names = head.origin.names if same and head.origin is not None else {}
    tensors = dict(head.tensors)
    if not same:
        tensors = _with_tables(head, kind, tensors)
    return {
        names.get(name, kind.stored_name(name)): _checked(names.get(name, kind.stored_name(name)), tensor, bad)
        for name, tensor in tensors.items()
    }, bad


def _with_tables(head: Head, kind: Format, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`t2d` follows from `d2t`: added or left out as the format has it."""
    if kind.tables == "d2t":
        return {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    if kind.tables == "both" and "d2t" in tensors and "t2d" not in tensors:
        t2d = as_offsets(head.vocab.targets, head.config.vocab_size)[1]
        return tensors | {"t2d": Outgoing(t2d.dtype, t2d.shape, lambda: t2d)}
    return tensors


def _checked(name: str, tensor: Tensor, bad: list[str]) -> Outgoing:
    def make() -> np.ndarray[Any, Any]:
        array = array_of(tensor)
        if not is_finite(array):
            bad.append(name)
        return array

    return Outgoing(tensor.dtype, tensor.shape, make)
