"""From a folder or a hub id to a table of tensors; no weight is read before it is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint.problems import CheckpointError
from eagle3_jax.checkpoint.safetensors_file import TensorInfo, read_header
from eagle3_jax.checkpoint.torch_file import read_torch_file

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "pytorch_model*.bin")
SINGLE, INDEX, TORCH = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder and the tensors it holds, by name."""

    folder: Path
    tensors: dict[str, TensorInfo]

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self.tensors.values())


def resolve(path_or_id: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of `path_or_id`, downloaded from the Hugging Face hub when it is not a folder.

    Without `weights` a download leaves them out.

    Raises:
      CheckpointError: neither a folder nor a repository that can be reached.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(path_or_id, ["is a file; give the folder that holds config.json and the weights"])
    parts = str(path_or_id).split("/")
    if len(parts) > 2 or not all(parts) or str(path_or_id).startswith((".", "~")):
        raise CheckpointError(path_or_id, ["no such folder (and a hub id has the form owner/name)"])
    return _download(str(path_or_id), revision, PATTERNS if weights else PATTERNS[:1])


def _download(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(repo, ["no such folder; to fetch it from the hub: pip install huggingface_hub"]) from None
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises its own, httpx's and the operating system's errors
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(repo, [f"no such folder, and the hub did not give it{at}: {first}"]) from error


def read_json(folder: Path, name: str, *, required: bool = False) -> dict[str, Any]:
    """The table in `folder/name`; {} when absent and not required."""
    file = folder / name
    if not file.is_file():
        if required:
            raise CheckpointError(folder, [f"{name} is missing"])
        return {}
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(folder, [f"{name} is not JSON: {error}"]) from error
    if not isinstance(table, dict):
        raise CheckpointError(folder, [f"{name} is not a table"])
    return table


def open_source(folder: Path) -> Source:
    """Reads every header of the weights in `folder`.

    Raises:
      CheckpointError: with every fault found: missing or truncated files, headers that lie, tensors stored twice, an
        index that names files outside the folder or disagrees with the files.
    """
    if (folder / INDEX).is_file():
        return _open_sharded(folder)
    files = weight_files(folder)
    if not files:
        raise CheckpointError(folder, [f"no weights: none of {SINGLE}, {INDEX}, {TORCH}{_held(folder)}"])
    tensors, problems = _read_files(files)
    if problems:
        raise CheckpointError(folder, problems)
    return Source(folder, tensors)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder without an index."""
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    return files or [f for f in (folder / TORCH,) if f.is_file()]


def has_weights(folder: Path) -> bool:
    """Whether there are weights, or an index that promises some."""
    return (folder / INDEX).is_file() or bool(weight_files(folder))


def _held(folder: Path) -> str:
    held = sorted(p.name for p in folder.iterdir())
    return (
        f" (the folder holds {', '.join(held[:8])}{' ...' if len(held) > 8 else ''})"
        if held
        else " (the folder is empty)"
    )


def _open_sharded(folder: Path) -> Source:
    index = read_json(folder, INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(folder, [f"{INDEX} has no weight_map from tensor names to file names"])
    names = sorted(set(weight_map.values()))
    outside = [n for n in names if Path(n).name != n or n in ("", ".", "..")]
    absent = [n for n in names if n not in outside and not (folder / n).is_file()]
    problems = [f"{INDEX} names {n!r}, which is not a file of this folder" for n in outside]
    problems += [
        f"{n} is missing: {sum(v == n for v in weight_map.values())} tensors of {INDEX} are in it" for n in absent
    ]
    tensors, found = _read_files([folder / n for n in names if n not in outside and n not in absent])
    problems += found
    readable = {info.file.name for info in tensors.values()}
    problems += [
        f"{file}: tensor {name!r} is promised by {INDEX} but not in the file"
        for name, file in weight_map.items()
        if file in readable and name not in tensors
    ]
    problems += [
        f"tensor {name!r} is in {tensors[name].file.name}, {INDEX} says {file}"
        for name, file in weight_map.items()
        if name in tensors and tensors[name].file.name != file
    ]
    problems += [f"{t.file.name}: tensor {n!r} is not in {INDEX}" for n, t in tensors.items() if n not in weight_map]
    if problems:
        raise CheckpointError(folder, problems)
    return Source(folder, tensors)


def _read_files(files: list[Path]) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for file in files:
        found, faults = read_torch_file(file) if file.suffix == ".bin" else read_header(file)
        problems += faults
        for name, info in found.items():
            if name in tensors:
                problems.append(f"tensor {name!r} is in both {tensors[name].file.name} and {file.name}")
            tensors.setdefault(name, info)
    return tensors, problems
