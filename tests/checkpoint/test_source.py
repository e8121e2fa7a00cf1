"""Files and headers: what is read, and that every fault is named with its file and tensor."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.safetensors_file import DTYPES, Outgoing, write_file
from eagle3_jax.checkpoint.source import INDEX, SINGLE, open_source, resolve


def write(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    write_file(file, {name: Outgoing(a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()})


def write_raw(file: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def problems(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    return "\n".join(caught.value.problems)


def shards(folder: Path, files: Mapping[str, Mapping[str, np.ndarray]], **index: str) -> None:
    """Several files and their index; `index` adds entries or overrides them."""
    weight_map = {}
    for file, arrays in files.items():
        write(folder / file, arrays)
        weight_map |= dict.fromkeys(arrays, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | index}))


ROW = np.arange(6, dtype=np.float32)


def test_every_dtype_makes_the_round_trip_and_safetensors_reads_it(tmp_path: Path) -> None:
    arrays = {name: np.arange(12).reshape(3, 4).astype(dtype) for name, dtype in DTYPES.items()}
    arrays["empty"] = np.zeros((0, 3), np.float32)
    write(tmp_path / SINGLE, arrays)
    found = open_source(tmp_path).tensors
    assert all(np.array_equal(found[name].read(), a) and found[name].dtype == a.dtype for name, a in arrays.items())
    theirs = safetensors.torch.load_file(tmp_path / SINGLE)
    assert all(np.array_equal(theirs[name].double().numpy(), a.astype(np.float64)) for name, a in arrays.items())


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    arrays = {"a": ROW, "b": ROW.reshape(2, 3).astype(ml_dtypes.bfloat16)}
    safetensors.numpy.save_file(arrays, tmp_path / SINGLE)
    found = open_source(tmp_path).tensors
    assert all(np.array_equal(found[name].read(), a) for name, a in arrays.items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file (0 bytes)"),
        (b"\x00" * 4, "not a safetensors file (4 bytes)"),
        (b"<!DOCTYPE html><html>not a model</html>", "not a safetensors file"),
        (struct.pack("<Q", 500) + b"{}", "truncated inside its header"),
        (struct.pack("<Q", 2) + b"[]", "its header is not a table"),
        (struct.pack("<Q", 4) + b"{{{{", "not a safetensors file"),
        (struct.pack("<Q", 16) + b'{"a":1,  "a":2 }', "names ['a'] twice"),
    ],
    ids=["empty", "short", "html", "header cut", "list", "not json", "twice"],
)
def test_what_is_not_safetensors_is_said_to_be_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    found = problems(tmp_path)
    assert SINGLE in found and message in found


def test_all_faults_of_a_header_are_told_at_once(tmp_path: Path) -> None:
    header = {
        "lies": entry([2, 3], 0, 8),
        "odd": entry([2], 0, 8, "F4"),
        "negative": entry([-2], 0, 8),
        "bare": {"dtype": "F32"},
        "one": entry([4], 0, 16),
        "two": entry([4], 8, 24),
        "beyond": entry([4], 24, 40),
    }
    write_raw(tmp_path / SINGLE, header, b"\x00" * 32)
    found = problems(tmp_path)
    expected = [
        "'lies': F32 [2, 3] needs 24 bytes, its header gives it 8", "'odd': dtype 'F4'", "'negative': its shape [-2]",
        "'bare': its header entry lacks", "'one' and 'two' overlap", "truncated", "beyond incomplete",
    ]  # fmt: skip
    assert [text for text in expected if text not in found] == []


def test_a_truncated_file_names_the_tensors_it_lost(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {"kept": ROW, "lost": ROW})
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:-4])
    assert "lost incomplete" in problems(tmp_path) and "kept" not in problems(tmp_path)


def test_bytes_that_no_tensor_owns_are_a_fault(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE, {"a": entry([1], 0, 4)}, b"\x00" * 9)
    assert "5 bytes after the last tensor" in problems(tmp_path)


def test_shards_are_one_table(tmp_path: Path) -> None:
    shards(tmp_path, {"m-1.safetensors": {"a": ROW}, "m-2.safetensors": {"b": ROW * 2}})
    assert np.array_equal(open_source(tmp_path).tensors["b"].read(), ROW * 2)


def test_all_faults_of_an_index_are_told_at_once(tmp_path: Path) -> None:
    files = {"m-1.safetensors": {"a": ROW, "extra": ROW}, "m-2.safetensors": {"a": ROW, "b": ROW}}
    more = {"gone": "m-3.safetensors", "outside": "../m-4.safetensors", "promised": "m-1.safetensors"}
    shards(tmp_path, files, **more)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["extra"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    found = problems(tmp_path)
    expected = [
        "m-3.safetensors is missing: 1 tensors", "'../m-4.safetensors', which is not a file of this folder",
        "tensor 'promised' is promised", "tensor 'a' is in both m-1.safetensors and m-2.safetensors",
        "m-1.safetensors: tensor 'extra' is not in",
    ]  # fmt: skip
    assert [text for text in expected if text not in found] == []


def test_the_message_lists_many_problems_but_not_all(tmp_path: Path) -> None:
    error = CheckpointError(tmp_path, [f"fault {i}" for i in range(100)])
    assert len(error.problems) == 100 and "100 problems" in str(error) and "and 40 more" in str(error)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    assert "no weights" in problems(tmp_path) and "README.md" in problems(tmp_path)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "a/b/c", "no-owner/no-such-model"])
def test_neither_folder_nor_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(name)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / SINGLE)


def torch_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24).reshape(4, 6)
    return {
        "half": base.half(), "bf16": base.bfloat16(), "long": base, "bool": base % 2 == 0,
        "turned": base.float().T, "columns": base.float()[:, 1:3], "alone": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(base.float()),
    }  # fmt: skip


def test_a_torch_file_is_read_without_torch(tmp_path: Path) -> None:
    tensors = torch_tensors()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = open_source(tmp_path).tensors
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(found[name].read().astype(np.float64), tensor.detach().double().numpy()), name


class Hostile:
    """Would create a file if it were unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_hostile_torch_file_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weight": Hostile(trace)}))
    assert "refused, it would run pathlib" in problems(tmp_path) and not trace.exists()


def test_a_damaged_torch_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(torch_tensors(), file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "pytorch_model.bin: not the zip archive" in problems(tmp_path)


def test_a_torch_file_whose_tensors_overrun_their_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(64)}, file)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:16] if name.endswith("data/0") else content)
    assert "'a': shape [64] does not fit into its 16 bytes" in problems(tmp_path)


def test_a_hub_id_is_downloaded_without_code_and_at_its_revision(tmp_path: Path, monkeypatch: Any) -> None:
    calls = []

    def snapshot_download(repo: str, **options: Any) -> str:
        calls.append((repo, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("owner/name", "v2") == tmp_path and resolve("owner/name", weights=False) == tmp_path
    (repo, full), (_, small) = calls
    assert repo == "owner/name" and full["revision"] == "v2" and small["allow_patterns"] == ["*.json"]
    assert "*.safetensors" in full["allow_patterns"] and not any(p.endswith("py") for p in full["allow_patterns"])


def test_what_the_hub_says_is_passed_on(monkeypatch: Any) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        raise OSError("401 Client Error: gated\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="the hub did not give it at revision v2: 401 Client Error: gated$"):
        resolve("owner/name", "v2")
