"""Reading and writing heads in every format: what goes round comes back, and nothing is dropped in silence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_jax.checkpoint import CheckpointError, load_drafter
from eagle3_jax.checkpoint.formats import FORMATS, Choices, Head, read_head, write_head
from eagle3_jax.checkpoint.formats.head import array_of
from eagle3_jax.checkpoint.formats.tensors import stored_shapes
from eagle3_jax.checkpoint.source import open_source, read_json
from eagle3_jax.checkpoint.vocab_map import as_offsets
from eagle3_jax.errors import ConfigError
from tests.checkpoint import heads
from tests.checkpoint.test_drafter import SPECFORGE, TARGET, TOKENS, D, U, V, head_tensors, write

IDS = heads.IDS


def tensors_of(head: Head) -> dict[str, tuple[Any, ...]]:
    """Everything but t2d, which follows from d2t."""
    arrays = {name: np.ascontiguousarray(array_of(t)) for name, t in head.tensors.items() if name != "t2d"}
    return {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in arrays.items()}


@pytest.mark.parametrize("name", heads.NAMES)
def test_by_way_of_native_comes_back_the_same_folder(name: str, tmp_path: Path) -> None:
    first = heads.make(name, tmp_path / "a")
    kind = name.partition(",")[0]
    head = read_head(first)
    assert head.format == kind and head.why
    write_head(head, tmp_path / "native", "native")
    native = read_head(tmp_path / "native")
    assert (native.config, native.aux_layers, native.tied) == (head.config, head.aux_layers, head.tied)
    assert native.format == "native" and native.carried == head.carried and native.unknown_keys == head.unknown_keys
    write_head(native, tmp_path / "b", kind)
    assert heads.contents(tmp_path / "b") == heads.contents(first)
    assert read_json(tmp_path / "b", "config.json") == read_json(first, "config.json")


def test_native_twice_is_native(tmp_path: Path) -> None:
    write_head(read_head(heads.make("modelopt", tmp_path / "a")), tmp_path / "b", "native")
    write_head(read_head(tmp_path / "b"), tmp_path / "c", "native")
    assert heads.contents(tmp_path / "b") == heads.contents(tmp_path / "c")
    assert (tmp_path / "b" / "config.json").read_text() == (tmp_path / "c" / "config.json").read_text()
    source = read_json(tmp_path / "c", "config.json")["source"]
    assert source["format"] == "modelopt" and source["aux_ids"] == [1, 4, 6] and source["aux_convention"] == "output"
    assert source["config"] == read_json(tmp_path / "a", "config.json")


# What each kind of head has that a format has no words for; what is not listed must go through.
FLAT = ("eagle", "specforge", "angelslim", "modelopt")
LOST: dict[tuple[str, str], str] = {
    **{("specforge, EAGLE-3.1", to): "fc_norm" for to in ("eagle", "angelslim", "modelopt")},
    **{("specforge, a key of vLLM's", to): "norm_before_residual" for to in ("eagle", "angelslim", "modelopt")},
    ("specforge, a key of vLLM's", "speculators"): "trained_by",
    **{("specforge, SGLang's second layer", to): "2 layers" for to in ("eagle", "angelslim", "modelopt")},
    **{("speculators", to): "q/k norms" for to in FLAT},
    **{("speculators, two layers", to): "2 layers" for to in FLAT},
    **{("speculators, trained embedding", to): "a trained embedding" for to in FLAT},
    **{
        (name, "eagle"): "it has no ids"
        for name in (
            "specforge", "specforge, names of a model", "specforge, biases", "speculators, llama",
            "speculators, whole vocabulary",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "to"), [(n, to) for n in heads.NAMES for to in sorted(FORMATS) if n.partition(",")[0] != to]
)
def test_by_way_of_another_format_nothing_is_lost_or_it_is_refused(name: str, to: str, tmp_path: Path) -> None:
    head = read_head(heads.make(name, tmp_path / "a"), TARGET)
    head = dataclasses.replace(head, verifier="owner/target")
    if (name, to) in LOST:
        with pytest.raises(ConfigError, match=LOST[name, to]):
            write_head(head, tmp_path / "b", to)
        assert not (tmp_path / "b").exists()
        return
    write_head(head, tmp_path / "b", to, drop=head.unknown_keys)
    there = read_head(tmp_path / "b", TARGET)
    assert there.config == head.config and there.aux_layers == head.aux_layers
    assert tensors_of(there) == tensors_of(head)
    carried = {k: v for k, v in there.carried.items() if k in head.carried}
    assert carried == head.carried
    kind = name.partition(",")[0]
    there = dataclasses.replace(there, verifier="owner/target")
    if to != "native" and FORMATS[kind].cannot(head):  # it said what its format commonly does not: refused, not dropped
        with pytest.raises(ConfigError):
            write_head(there, tmp_path / "c", kind)
        return
    write_head(there, tmp_path / "c", kind)
    back = read_head(tmp_path / "c", TARGET)
    assert back.config == head.config and tensors_of(back) == tensors_of(head)
    assert np.array_equal(back.vocab.targets, head.vocab.targets)


def test_every_thing_that_is_lost_is_named_at_once(tmp_path: Path) -> None:
    head = read_head(heads.make("speculators, two layers", tmp_path / "a"))
    config = dataclasses.replace(head.config, aux_layers=(0, 4, 8), norm_before_residual=True, qk_norm=True)
    head = dataclasses.replace(head, config=config, aux_layers=(0, 4, 8), unknown_keys=("odd",))
    with pytest.raises(ConfigError) as caught:
        write_head(head, tmp_path / "b", "angelslim")
    words = ("norm_before_residual", "q/k norms", "2 layers", "boundary 0", "fc_norm", "norm_output", "key odd")
    assert [w for w in words if w not in str(caught.value)] == []
    with pytest.raises(ConfigError, match="aux layers that are not known.*target is not named"):
        write_head(dataclasses.replace(head, aux_layers=None, verifier=None), tmp_path / "b", "speculators")


def test_only_what_changed_is_changed_in_the_heads_own_config(tmp_path: Path) -> None:
    folder = heads.make("specforge", tmp_path / "a")
    write_head(read_head(folder, choices=Choices(overrides={"rope_theta": 5e5})), tmp_path / "b", "specforge")
    before, after = read_json(folder, "config.json"), read_json(tmp_path / "b", "config.json")
    assert after.pop("rope_parameters")["rope_theta"] == after.pop("rope_theta") == 5e5
    assert after == {k: v for k, v in before.items() if k != "rope_theta"}


def test_absolute_ids_become_offsets_and_t2d_is_made(tmp_path: Path) -> None:
    tensors = head_tensors("layers.0.") | {"d2t": TOKENS.astype(np.int64)}
    folder = write(tmp_path / "a", heads.MODELOPT, heads.without(tensors, "t2d"))
    head = read_head(folder)
    assert any("absolute" in note for note in head.notes)
    write_head(head, tmp_path / "b", "specforge")
    d2t, t2d = as_offsets(TOKENS, V)
    found = open_source(tmp_path / "b").tensors
    assert np.array_equal(found["d2t"].read(), d2t) and np.array_equal(found["t2d"].read(), t2d)
    assert read_head(tmp_path / "b").vocab.how == "offset"


def test_a_torch_file_is_converted_bit_for_bit(tmp_path: Path) -> None:
    tensors = head_tensors()
    stored = {n: torch.tensor(a).half() if a.dtype == np.float32 else torch.tensor(a) for n, a in tensors.items()}
    (tmp_path / "a").mkdir()
    torch.save(stored, tmp_path / "a" / "pytorch_model.bin")
    (tmp_path / "a" / "config.json").write_text(json.dumps({**heads.EAGLE}))
    head = dataclasses.replace(read_head(tmp_path / "a", TARGET), verifier="owner/target")
    write_head(head, tmp_path / "b", "speculators")
    found = open_source(tmp_path / "b").tensors
    assert found["layers.0.mlp.up_proj.weight"].dtype == np.float16
    for name, tensor in stored.items():
        assert np.array_equal(found[name.replace("midlayer.", "layers.0.")].read(), tensor.numpy())


def test_a_tied_output_is_the_embedding(tmp_path: Path) -> None:
    tensors = heads.without(head_tensors(), "lm_head.weight", "d2t", "t2d") | {"embed_tokens.weight": heads.EMBEDDING}
    config = SPECFORGE | {"tie_word_embeddings": True, "draft_vocab_size": V}
    folder = write(tmp_path / "a", config, tensors)
    loaded = load_drafter(folder, TARGET)
    assert np.array_equal(loaded.model.lm_head.kernel[...], heads.EMBEDDING.T)
    write_head(dataclasses.replace(read_head(folder), verifier="x"), tmp_path / "b", "speculators")
    again = load_drafter(tmp_path / "b", TARGET)
    assert np.array_equal(again.model.lm_head.kernel[...], heads.EMBEDDING.T)
    assert read_json(tmp_path / "b", "config.json")["tie_word_embeddings"] is True
    with pytest.raises(CheckpointError, match="tied without lm_head.weight"):
        read_head(write(tmp_path / "c", config, heads.without(tensors, "embed_tokens.weight")))
    untied = write(tmp_path / "d", SPECFORGE, heads.without(head_tensors(), "lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight, expected \[40, 32\]"):
        read_head(untied)
    both = read_head(write(tmp_path / "e", SPECFORGE | {"tie_word_embeddings": True}, head_tensors()))
    assert not both.tied and any("lm_head.weight is there" in note for note in both.notes)


@pytest.mark.parametrize("name", heads.NAMES)
def test_shapes_are_those_of_the_module(name: str, tmp_path: Path) -> None:
    """The table of shapes used without a device, against what the module asks for when it is filled."""
    folder = heads.make(name, tmp_path)
    loaded = load_drafter(folder, TARGET, dtype="float32")
    head = read_head(folder, TARGET)
    shapes = stored_shapes(head.config, embedding=head.config.own_embedding)
    weights = {n for n in head.tensors if n not in ("d2t", "t2d", "embed_tokens.weight")}
    assert weights == shapes.keys() - {"embed_tokens.weight"}
    fused = len(loaded.config.aux_layers) * TARGET.hidden_size
    assert shapes["fc.weight"] == (D, fused) == tuple(reversed(loaded.model.fc.kernel.shape))


def test_nan_and_infinite_weights_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    tensors = head_tensors()
    tensors["fc.weight"][3, 5] = np.nan
    tensors["norm.weight"][0] = np.inf
    folder = write(tmp_path / "a", SPECFORGE, tensors)
    with pytest.raises(CheckpointError) as caught:
        write_head(read_head(folder), tmp_path / "b", "native")
    assert "fc.weight" in str(caught.value) and "norm.weight" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    with pytest.raises(CheckpointError, match=r"fc.weight holds NaN"):
        load_drafter(folder, TARGET)


def test_everything_is_told_at_once_even_of_a_broken_config(tmp_path: Path) -> None:
    config = SPECFORGE | {
        "num_attention_heads": "four",
        "logit_scale": 2.0,
        "eagle_config": {IDS: [5, 3, 99], "odd": 1},
    }
    del config["hidden_size"]
    tensors = heads.without(head_tensors(), "midlayer.mlp.up_proj.weight") | {"surprise": np.zeros(2, np.float32)}
    with pytest.raises(CheckpointError) as caught:
        read_head(write(tmp_path, config, tensors), TARGET)
    found = "\n".join(caught.value.problems)
    expected = (
        "num_attention_heads is 'four'", "'hidden_size' is missing", "[100] are outside the boundaries 0..10",
        "missing: midlayer.mlp.up_proj.weight", "unknown: surprise", "unknown key logit_scale",
        "unknown key eagle_config.odd",
    )  # fmt: skip
    assert [text for text in expected if text not in found] == []


def test_unknown_keys_are_noted_when_a_head_is_loaded(tmp_path: Path) -> None:
    loaded = load_drafter(write(tmp_path, SPECFORGE | {"logit_scale": 2.0}, head_tensors()), TARGET)
    assert any("not known here: logit_scale" in note for note in loaded.notes)


def test_ids_at_the_top_level_of_a_flat_config_are_boundaries(tmp_path: Path) -> None:
    config = {k: v for k, v in SPECFORGE.items() if k != "eagle_config"} | {IDS: [1, 4, 8]}
    head = read_head(write(tmp_path / "a", config, head_tensors()))
    assert head.aux_layers == (1, 4, 8) and "as vLLM reads them" in head.warnings[0]
    slim = config | {"aux_hidden_states_layer_ids": [0, 3, 7]}
    del slim[IDS]
    assert read_head(write(tmp_path / "b", slim, head_tensors())).aux_layers == (1, 4, 8)


def test_theta_that_is_spelled_twice_or_is_not_the_targets(tmp_path: Path) -> None:
    both = SPECFORGE | {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    head = read_head(write(tmp_path, both, head_tensors()), TARGET)
    assert head.config.rope.theta == 5e5
    assert any("is spelled 10000.0, 500000.0; 500000 is used" in text for text in head.warnings)
    assert any("rope theta is 500000, the target's 1e+06" in text for text in head.warnings)


def test_default_layers_wait_for_a_target(tmp_path: Path) -> None:
    folder = heads.make("eagle", tmp_path / "a")
    head = read_head(folder)
    assert head.aux_layers is None and len(head.config.aux_layers) == 3
    write_head(head, tmp_path / "b", "specforge")
    assert "eagle_config" not in read_json(tmp_path / "b", "config.json")
    assert read_head(tmp_path / "b", TARGET).aux_layers == read_head(folder, TARGET).aux_layers == (2, 5, 7)
    write_head(read_head(folder, TARGET), tmp_path / "c", "specforge")
    assert read_json(tmp_path / "c", "config.json")["eagle_config"][IDS] == [1, 4, 6]
    write_head(read_head(tmp_path / "c"), tmp_path / "d", "eagle")  # the default of some target: noted
    assert read_head(tmp_path / "d", TARGET).aux_layers == (2, 5, 7)


def test_a_native_folder_of_another_version_or_without_its_source(tmp_path: Path) -> None:
    write_head(read_head(heads.make("specforge", tmp_path / "a")), tmp_path / "b", "native")
    raw = read_json(tmp_path / "b", "config.json")
    (tmp_path / "b" / "config.json").write_text(json.dumps(raw | {"source": None}))
    head = read_head(tmp_path / "b")
    assert head.origin is None
    write_head(head, tmp_path / "c", "specforge")
    assert read_head(tmp_path / "c").config == read_head(tmp_path / "a").config
    (tmp_path / "b" / "config.json").write_text(json.dumps(raw | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="format_version 99; this version reads 1"):
        read_head(tmp_path / "b")


def test_a_loaded_native_head_is_the_one_it_came_from(tmp_path: Path) -> None:
    write_head(read_head(heads.make("specforge, EAGLE-3.1", tmp_path / "a")), tmp_path / "b", "native")
    first, second = (load_drafter(tmp_path / name, TARGET, dtype="float32") for name in "ab")
    assert first.config == second.config and second.format == "native"
    assert np.array_equal(first.model.fc.kernel[...], second.model.fc.kernel[...])
    assert np.array_equal(second.model.d2t[...], TOKENS) and second.model.d2t.shape == (U,)
