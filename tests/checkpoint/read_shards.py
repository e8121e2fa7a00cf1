"""One process of several: loads targets spread over the devices of all, and says what it read and what is wrong.

python -m tests.checkpoint.read_shards FLAGS FOLDER...: a line of JSON for each folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from eagle3_jax import distributed
from eagle3_jax.checkpoint import load_target
from eagle3_jax.sharding import make_mesh
from eagle3_jax.target import Target

SYSTEM = Path("/proc/self/io")


def bytes_by_system() -> int:
    """Bytes that this process has asked of the system, by the system's own count."""
    return int(SYSTEM.read_text().split("rchar:")[1].split()[0]) if SYSTEM.exists() else 0


def arrays_of(model: Target) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(nnx.state(model))}


def report(folder: str) -> dict[str, object]:
    mesh = make_mesh(tensor=jax.device_count())
    load_target(folder, mesh=mesh)  # whatever else is read once: modules, compiled programs
    before = bytes_by_system()
    loaded = load_target(folder, mesh=mesh)
    asked = bytes_by_system() - before
    alone = load_target(folder)
    whole = arrays_of(alone.model)
    parts = [(n, s) for n, x in arrays_of(loaded.model).items() for s in x.addressable_shards]
    wrong = [name for name, part in parts if not np.array_equal(part.data, np.asarray(whole[name])[part.index])]
    counts = {"read": loaded.bytes_read, "asked": asked, "whole": alone.bytes_read}
    return {**counts, "wrong": wrong, "parts": len(parts), "parameters": len(whole)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    parser.add_argument("folders", nargs="+")
    args = parser.parse_args()
    with distributed.session(args):
        lines = [json.dumps(report(folder)) for folder in args.folders]
        Path(f"{args.folders[0]}.{jax.process_index()}").write_text("\n".join(lines))
