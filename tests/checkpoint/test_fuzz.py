"""Folders that are broken or hostile in every way that chance finds: an error that names them, never a crash."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_jax.checkpoint import CheckpointError
from eagle3_jax.checkpoint.formats import FORMATS, read_head, write_head
from eagle3_jax.checkpoint.source import INDEX, SINGLE, open_source
from eagle3_jax.cli import main
from eagle3_jax.errors import UserError
from tests.checkpoint import heads
from tests.checkpoint.test_drafter import EAGLE, SPECFORGE, TARGET, head_tensors, write

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), -0.5, "", "x", "\x00",
    "llama", [], [0], [[1]], [1, 46, 90], ["a"], [None], list(range(300)), {}, {"a": 1}, {"rope_type": "yarn"},
    {"rope_theta": "x"}, {"rope_theta": [1]}, {"type": []}, "Eagle3Speculator", ["Eagle3Speculator"], [{}], "../../etc",
]  # fmt: skip
KEYS = [
    "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "eagle_config", "architectures",
    "transformer_layer_config", "speculators_config", "draft_vocab_size", "target_hidden_size", "layer_types",
    "quantization_config", "tie_word_embeddings", "fc_norm", heads.IDS, "aux_hidden_states_layer_ids", "model_type",
    "speculators_model_type", "hidden_act", "sliding_window", "use_sliding_window", "source", "rope", "num_kv_heads",
]  # fmt: skip


def accepted(folder: Path, root: Path) -> bool:
    """Whether the folder is read; then it must also be written and read again. Any error but ours is a failure."""
    for target in (None, TARGET):
        try:
            head = read_head(folder, target)
        except UserError as error:
            assert str(error)
            continue
        head = dataclasses.replace(head, verifier="t")
        for to in FORMATS:
            try:
                write_head(head, root / "out", to, drop=head.unknown_keys)
            except UserError:
                continue
            read_head(root / "out", target)
        return True
    return False


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy with one place in it replaced, removed or added to."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        out = dict(value)
        key = chance.choice([*out, *KEYS])
        if chance.random() < 0.2:
            out.pop(key, None)
        elif isinstance(out.get(key), dict | list) and chance.random() < 0.6:
            out[key] = mutated(out[key], chance)
        else:
            out[key] = chance.choice(JUNK)
        return out
    if isinstance(value, list) and value and chance.random() < 0.7:
        out_list = list(value)
        out_list[chance.randrange(len(out_list))] = chance.choice(JUNK)
        return out_list
    return chance.choice(JUNK)


@pytest.mark.parametrize("name", ["eagle", "specforge, EAGLE-3.1", "modelopt", "speculators", "native"])
def test_configs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = heads.make("specforge" if name == "native" else name, tmp_path / "a")
    if name == "native":
        write_head(read_head(folder), tmp_path / "b", "native")
        folder = tmp_path / "b"
    good = json.loads((folder / "config.json").read_text())
    chance = random.Random(name)
    outcomes = []
    for i in range(250):
        config = good
        for _ in range(chance.randint(1, 3)):
            config = mutated(config, chance) if isinstance(config, dict) else config
        (folder / "config.json").write_text(json.dumps(config))
        outcomes.append(accepted(folder, tmp_path))
        if i % 5 == 0:
            assert main(["inspect", str(folder)]) in (0, 2)
            capsys.readouterr()
    assert 10 < sum(outcomes) < 240  # both ways are taken


def flipped(content: bytes, chance: random.Random, head: int) -> bytes:
    """A few bytes changed, most of them among the first `head`; or cut; or stretched; or a piece repeated."""
    out = bytearray(content)
    kind = chance.random()
    if kind < 0.1:
        return bytes(out[: chance.randrange(len(out))])
    if kind < 0.2:
        at = chance.randrange(len(out))
        return bytes(out[:at] + out[at // 2 : at] + out[at:])
    for _ in range(chance.randint(1, 4)):
        out[chance.randrange(min(head, len(out)))] = chance.choice((0, 1, 0x22, 0x2C, 0x30, 0x39, 0x7B, 0x80, 0xFF))
    return bytes(out)


def test_headers(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", SPECFORGE, head_tensors())
    file = folder / SINGLE
    content, chance = file.read_bytes(), random.Random(1)
    length = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(300):
        file.write_bytes(flipped(content, chance, length))
        accepted(folder, tmp_path)


def test_headers_that_are_json_but_lie(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", SPECFORGE, head_tensors())
    content, chance = (folder / SINGLE).read_bytes(), random.Random(2)
    length = struct.unpack("<Q", content[:8])[0]
    good = json.loads(content[8 : 8 + length])
    for _ in range(300):
        text = json.dumps(mutated(good, chance)).encode()
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        accepted(folder, tmp_path)


def test_torch_files(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(EAGLE))
    file = folder / "pytorch_model.bin"
    torch.save({n: torch.tensor(a) for n, a in head_tensors().items()}, file)
    content, chance = file.read_bytes(), random.Random(3)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(name for name in members if name.endswith("data.pkl"))
    for i in range(200):
        if i % 2:
            file.write_bytes(flipped(content, chance, len(content)))
        else:
            _rewrite(file, members | {root: flipped(members[root], chance, len(members[root]))})
        accepted(folder, tmp_path)


def _rewrite(file: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_indices(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", SPECFORGE, head_tensors())
    good = {"metadata": {}, "weight_map": dict.fromkeys(head_tensors(), SINGLE)}
    chance = random.Random(4)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((folder / SINGLE).read_bytes())
    for junk in ("../outside.safetensors", str(outside), "sub/../../outside.safetensors", "", ".", "..", "\x00", "~"):
        index = {"weight_map": good["weight_map"] | {"fc.weight": junk}}
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="not a file of this folder|missing"):
            open_source(folder)
    for _ in range(100):
        (folder / INDEX).write_text(json.dumps(mutated(good, chance)))
        accepted(folder, tmp_path)


def _deep() -> bytes:
    return b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    "content", [_deep(), b"\xff\xfe\x00", b'{"a": ' + b"9" * 5000 + b"}", b"", b"[]", b"null"],
    ids=["deep", "not utf-8", "long number", "empty", "list", "null"],
)  # fmt: skip
def test_what_is_no_config(content: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", SPECFORGE, head_tensors())
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_head(folder)
    text = content
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError):
        open_source(folder)


def _expanded() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}


def _absurd_memo() -> bytes:
    return b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFF0) + b"."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: torch.save(_expanded(), file), "does not fit into its"),
        (lambda file: _rewrite(file, {"a/data.pkl": _absurd_memo()}), "its memo has an entry"),
        (lambda file: _rewrite(file, {"a/data.pkl": pickle.dumps({"a": 3})}), "not a tensor"),
        (lambda file: _rewrite(file, {"a/data.pkl": pickle.dumps(print)}), "it would run builtins.print"),
        (lambda file: _rewrite(file, {"a/data.pkl": b"cos\nsystem\n(S'true'\ntR."}), "it would run os.system"),
        (lambda file: _rewrite(file, {"a/data.pkl": b"", "b/data.pkl": b""}), "2 data.pkl members"),
        (lambda file: file.write_bytes(b"PK\x03\x04"), "not the zip archive"),
    ],
    ids=["repeated bytes", "memo", "number", "function", "command", "two", "stub"],
)
def test_hostile_torch_files(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    make(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        read_head(tmp_path)


def test_absurd_sizes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {
        "d2t": [0, 10**30],
        "t2d": [1] * 100,
        "lm_head.weight": [10**20, 0],
        "fc.weight": [10**9] * 3,
    }
    folder = write(tmp_path / "a", SPECFORGE, head_tensors())
    content = (folder / SINGLE).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for name, shape in shapes.items():
        lying = header | {name: {"dtype": header[name]["dtype"], "shape": shape, "data_offsets": [0, 0]}}
        text = json.dumps(lying).encode()
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        with pytest.raises(CheckpointError, match=name):
            read_head(folder)
    for key in ("num_hidden_layers", "hidden_size", "draft_vocab_size", "vocab_size", "intermediate_size"):
        write(folder, SPECFORGE | {key: 10**9}, head_tensors())
        with pytest.raises(CheckpointError):
            read_head(folder)
    assert np.array_equal(read_head(write(folder, SPECFORGE, head_tensors())).vocab.targets.shape, (40,))
