"""Loading onto a mesh: what a process reads, what it holds in memory, and what is said of files that go bad."""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.checkpoint import CheckpointError, load_drafter, load_target, ranges
from eagle3_jax.checkpoint.fill import to_device
from eagle3_jax.checkpoint.layout import CONV, SAME, TRANSPOSE, Layout, Parameter, Piece, Rows
from eagle3_jax.checkpoint.safetensors_file import Outgoing, TensorInfo, read_header, write_file
from eagle3_jax.checkpoint.source import open_source
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.sharding import make_mesh
from tests.checkpoint import tiny
from tests.checkpoint.read_shards import arrays_of
from tests.checkpoint.test_drafter import SPECFORGE, TARGET, head_tensors, write
from tests.checkpoint.test_target import Folder
from tests.conftest import ROOT
from tests.processes import TIMEOUT, environment, free_port

KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "llama")
MESHES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 4},  # two key/value heads: on every device
    "all": {"fsdp": 2, "expert": 2, "tensor": 2},
    "data": {"data": 2, "fsdp": 2},  # the same on two devices
}


def parts_of(x: jax.Array) -> int:
    """Bytes of the different parts of an array."""
    return sum({str(s.index): s.data.nbytes for s in x.addressable_shards}.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MESHES)
def test_each_byte_is_read_once_and_no_other(
    name: str, kind: str, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "SHORT", 1)
    monkeypatch.setattr(ranges, "BLOCK", 2048)
    folder = checkpoint(kind)
    with ranges.counted() as read:
        spread = load_target(folder, mesh=make_mesh(**MESHES[name]))
    arrays = arrays_of(spread.model)
    assert read.bytes == spread.bytes_read == sum(map(parts_of, arrays.values()))
    assert 0 < read.largest <= 2048
    monkeypatch.undo()
    whole = arrays_of(load_target(folder).model)
    assert arrays.keys() == whole.keys()
    assert [n for n, x in arrays.items() if not np.array_equal(np.asarray(x), np.asarray(whole[n]))] == []


def wide(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose matrices, cut by four, have rows of no less than `ranges.SHORT` bytes."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 1024}
    delta = {"linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_num_value_heads": 8}
    for table, more in (
        (tiny.COMMON, sizes | heads), (tiny.HYBRID, {**delta, "linear_value_head_dim": 128}),
        (tiny.SHARED, {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024}),
    ):  # fmt: skip
        for key, value in more.items():
            monkeypatch.setitem(table, key, value)
    monkeypatch.setattr(tiny, "SHARD", "2MB")
    return tiny.save(kind, folder / kind)


def test_each_of_two_processes_reads_its_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [wide(tmp_path, kind, monkeypatch) for kind in KINDS]
    port = str(free_port())
    flags = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    command = [sys.executable, "-m", "tests.checkpoint.read_shards", *map(str, folders), *flags]
    both = [
        subprocess.Popen([*command, str(i)], cwd=ROOT, env=environment(devices=2), stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    for i in range(2):
        lines = Path(f"{folders[0]}.{i}").read_text().splitlines()
        found = dict(zip(KINDS, map(json.loads, lines), strict=True))
        for kind, x in found.items():
            assert not x["wrong"] and x["parts"] == 2 * x["parameters"] > 20, kind
            assert 0.5 <= x["read"] / x["whole"] < 0.53, kind
            if Path("/proc/self/io").exists():  # the system's count: what we ask for, and headers
                assert x["read"] <= x["asked"] < x["read"] + 0.02 * x["whole"], (kind, x)


ROWS = np.random.default_rng(1).permutation(64).repeat(16) * 16 + np.tile(np.arange(16), 64)
VALUES = np.random.default_rng(0).standard_normal(2**20).astype(ml_dtypes.bfloat16)
# How it is stored, the shape stored, what of it is ours, and where that lies.
CASES: dict[str, tuple[Layout, tuple[int, ...], Callable[[np.ndarray], np.ndarray], PartitionSpec]] = {
    "fused experts": (TRANSPOSE, (8, 512, 256), lambda x: x.swapaxes(1, 2), PartitionSpec("fsdp", "data", "tensor")),
    "embedding": (SAME, (4096, 256), lambda x: x, PartitionSpec("tensor", "fsdp")),
    "linear": (TRANSPOSE, (256, 4096), lambda x: x.T, PartitionSpec(("fsdp", "tensor"), None)),
    "packed": (Rows(ROWS, 1024), (1024, 1024), lambda x: x[ROWS].T, PartitionSpec("fsdp", "tensor")),
    "convolution": (CONV, (2**18, 1, 4), lambda x: x[:, 0].T, PartitionSpec(None, "tensor")),
    "on every device": (SAME, (2**20,), lambda x: x, PartitionSpec()),
}


@pytest.mark.parametrize("name", CASES)
def test_one_part_and_one_block_are_in_memory_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU jax may keep the host's array as its own: instead it gets one whose memory is not traced."""
    put = jax.device_put

    def put_copy(x: np.ndarray, device: jax.Device) -> jax.Array:
        copy = np.frombuffer(mmap.mmap(-1, x.nbytes), x.dtype).reshape(x.shape)
        np.copyto(copy, x)
        return put(copy, device)

    monkeypatch.setattr(jax, "device_put", put_copy)
    monkeypatch.setattr(ranges, "BLOCK", 2**16)
    monkeypatch.setattr(ranges, "SHORT", 1)
    layout, shape, ours, spec = CASES[name]
    stored = VALUES.reshape(shape)
    info = stored_in(tmp_path / "x.safetensors", stored)
    want = ours(stored).astype(np.float32)
    parameter = Parameter("x", want.shape, want.dtype)
    sharding = NamedSharding(make_mesh(data=2, fsdp=2, tensor=2), spec)
    largest = 4 * math.prod(sharding.shard_shape(want.shape))
    gc.collect()
    tracemalloc.start()
    with ranges.counted() as read:
        array = to_device(parameter, [(Piece("x", layout), info)], sharding)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest <= peak < largest + 2**16 + 100_000
    assert read.bytes == stored.nbytes and read.largest <= 2**16
    assert np.array_equal(np.asarray(array), want)


def stored_in(file: Path, array: np.ndarray) -> TensorInfo:
    write_file(file, {"x": Outgoing(array.dtype, array.shape, lambda: array)})
    return read_header(file)[0]["x"]


def test_short_pieces_are_read_with_what_lies_between(tmp_path: Path) -> None:
    stored = np.arange(64 * 1024, dtype=np.float32).reshape(2, 32, 1024)
    info = stored_in(tmp_path / "x.safetensors", stored)
    for columns, expected in ((ranges.SHORT // 4 - 1, 32 * 4096), (ranges.SHORT // 4, 32 * ranges.SHORT)):
        index = (slice(1, 2), slice(0, 32), slice(5, 5 + columns))
        out = np.zeros((1, 32, columns))
        with ranges.counted() as read:
            info.read_into(out, index)
        assert np.array_equal(out, stored[index]) and read.bytes == expected


def test_what_a_block_inside_counts_is_counted_outside(tmp_path: Path) -> None:
    info = stored_in(tmp_path / "x.safetensors", np.ones(10, np.float32))
    with ranges.counted() as outer:
        info.read_into(np.zeros(2), (slice(0, 2),))
        with ranges.counted() as inner:
            info.read_into(np.zeros(7), (slice(3, 10),))
    assert (inner.bytes, outer.bytes, outer.largest) == (28, 36, 28)


def test_a_sharded_head_is_read_whole_by_its_check_and_then_by_parts(tmp_path: Path) -> None:
    folder = write(tmp_path, SPECFORGE, head_tensors())
    with ranges.counted() as read:
        head = load_drafter(folder, TARGET, mesh=make_mesh(tensor=2)).model
    whole = arrays_of(load_drafter(folder, TARGET).model)  # type: ignore[arg-type]
    arrays = arrays_of(head)  # type: ignore[arg-type]
    assert [n for n, x in arrays.items() if not np.array_equal(np.asarray(x), np.asarray(whole[n]))] == []
    weights = sum(info.nbytes for info in open_source(folder) if info.dtype == np.float32)
    assert 2 * weights <= read.bytes < 3 * weights


# ------------------------------------------------------------------------------------------------ what goes wrong


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_every_fault_of_the_files_is_told_before_a_weight_is_read(checkpoint: Folder, tmp_path: Path) -> None:
    folder = copy_of(checkpoint("qwen3_next"), tmp_path / "x")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    os.truncate(first, first.stat().st_size - 100)
    second.unlink()
    with ranges.counted() as read, pytest.raises(CheckpointError) as caught:
        load_target(folder, mesh=make_mesh(tensor=4))
    told = "\n".join(caught.value.problems)
    assert f"{first.name}: truncated" in told and f"{second.name} is missing" in told and not read.bytes


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: os.truncate(file, file.stat().st_size // 2), "has become shorter: .* needs bytes up to"),
        (Path.unlink, "cannot be read for .*: No such file"),
    ],
    ids=["cut", "gone"],
)
def test_files_that_change_after_their_headers_were_read(
    harm: Callable[[Path], None], message: str, checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(checkpoint("llama"), tmp_path / "x")
    last = max(folder.glob("*.safetensors"))

    def open_and_harm(where: Path) -> Any:
        source = open_source(where)
        harm(last)
        return source

    monkeypatch.setattr("eagle3_jax.checkpoint.hf.open_source", open_and_harm)
    with pytest.raises(CheckpointError, match=f"{folder}: {last.name} {message}"):
        load_target(folder, mesh=make_mesh(tensor=4))


def test_meshes_that_parameters_cannot_be_laid_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the folder, which is not there, is looked at."""
    other = Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(AxisType.Auto,))
    loaders: list[Callable[..., Any]] = [load_target, lambda folder, mesh: load_drafter(folder, TARGET, mesh=mesh)]
    for load in loaders:
        with pytest.raises(ConfigError, match="a mesh of axes model has no data, fsdp, expert, tensor; make it with"):
            load("/no/such/folder", mesh=other)
    with pytest.raises(ConfigError, match="needs 16 devices, 8 are here"):
        load_target("/no/such/folder", mesh=make_mesh(tensor=16))
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    for load in loaders:
        with pytest.raises(UserError, match="mesh uses 2 of the 8 devices of 4 processes"):
            load("/no/such/folder", mesh=make_mesh(tensor=2))
