"""What all formats of EAGLE-3 heads are read into and written from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from eagle3_jax.checkpoint.safetensors_file import Outgoing, TensorInfo
from eagle3_jax.checkpoint.vocab_map import VocabMap
from eagle3_jax.config import DraftConfig, RopeConfig

Convention = Literal["boundary", "output"]
"""What an aux id b means: the stream that enters layer b, or what leaves layer b (the boundary b + 1)."""
Tensor = TensorInfo | Outgoing
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EMBEDDING, OUTPUT, TABLES = "embed_tokens.weight", "lm_head.weight", ("d2t", "t2d")


@dataclasses.dataclass(frozen=True)
class Sections:
    """A config.json taken apart, the same for all formats.

    `layer` is the decoder layer's config under Hugging Face's names, not yet checked; `aux_ids` are as the file has
    them, and `convention` says how they are meant; `unknown` are keys of which it is not known what they do.
    """

    layer: Mapping[str, Any]
    flags: Mapping[str, bool]
    aux_ids: tuple[int, ...] | None = None
    convention: Convention = "output"
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    own_embedding: bool = False
    tied: bool = False
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ()
    num_target_layers: int | None = None
    rope: RopeConfig | None = None
    carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Origin:
    """The folder that a head was first read from: enough to write the same one again."""

    format: str
    config: Mapping[str, Any]
    names: Mapping[str, str]
    aux_ids: tuple[int, ...] | None
    convention: Convention


@dataclasses.dataclass(frozen=True)
class Head:
    """A head outside any device: its config, its tensors where they lie, and what was understood of its folder.

    `tensors` are keyed by our names, layers as `layers.0.`, stored as [out, in]; `d2t` holds offsets. When
    `aux_layers` is None the folder names none and the target is not known: the default boundaries are meant, and
    `config.aux_layers` has only the right length. `carried` are keys of the layer's config that change nothing here
    but may elsewhere (token ids, a sliding window).
    """

    config: DraftConfig
    aux_layers: tuple[int, ...] | None
    tensors: Mapping[str, Tensor]
    vocab: VocabMap
    format: str = "native"
    why: str = ""
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origin: Origin | None = None
    tied: bool = False
    num_target_layers: int | None = None
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ()
    carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unknown_keys: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Name of the dtype that the largest tensor is stored in."""
        return max(self.tensors.values(), key=lambda tensor: tensor.nbytes).dtype.name


@dataclasses.dataclass(frozen=True)
class Format:
    """One way of publishing a head.

    recognise: (config.json, tensor names) -> the reason why this is the format, "" when it is not.
    sections: takes a config.json apart.
    config: the config.json of a head.
    cannot: what of a head the format has no words for.
    remarks: what other programs make of a head in this format.
    first_layer: how its tensors' names begin in the decoder layer.
    tables: whether it has `t2d` beside `d2t` ("both"), only d2t ("d2t"), or what there is ("kept").
    """

    name: str
    title: str
    convention: Convention
    recognise: Callable[[Mapping[str, Any], tuple[str, ...]], str]
    sections: Callable[[Mapping[str, Any]], Sections]
    config: Callable[[Head], dict[str, Any]]
    cannot: Callable[[Head], list[str]]
    remarks: Callable[[Head], list[str]] = lambda head: []
    first_layer: str = "midlayer."
    tables: Literal["both", "d2t", "kept"] = "both"

    def stored_name(self, name: str) -> str:
        """The format's own name of a tensor of ours."""
        return name.replace("layers.0.", self.first_layer) if name.startswith("layers.0.") else name


def array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's values; a memory map where it lies in a file."""
    return tensor.make() if isinstance(tensor, Outgoing) else tensor.read()


def usual_layers(boundaries: tuple[int, ...]) -> int | None:
    """The number L of layers for which these are the default boundaries (2, L//2, L-3), if there is one."""
    if len(boundaries) != 3:
        return None
    layers = boundaries[2] + 3
    return layers if layers >= 7 and boundaries == (2, layers // 2, layers - 3) else None
