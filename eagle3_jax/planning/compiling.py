"""A step compiled for a TPU slice that is not here."""

from __future__ import annotations

import re
from typing import Any

from eagle3_jax.meshes import MeshShape
from eagle3_jax.planning.account import Job, Mode
from eagle3_jax.planning.chips import Topology, tpu_devices
from eagle3_jax.planning.collectives import Counts, collectives
from eagle3_jax.planning.report import Compiled


def compile_step(mode: Mode, job: Job, topology: Topology, shape: MeshShape) -> Compiled:
    """Lowers and compiles the real step; a program that is too large is a result, not an error.

    Raises:
      UserError: libtpu is missing.
    """
    lowered = mode.lower(job, shape.mesh(tpu_devices(topology)))
    try:
        program = lowered.compile()
    except Exception as error:  # jax's type for it differs between versions
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(too_large=_said(str(error)))
    memory: Any = program.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(kept, memory.temp_size_in_bytes, memory.generated_code_size_in_bytes, _collectives(program))


def _collectives(program: Any) -> Counts | None:
    """None where this jaxlib cannot print what a newer libtpu has made: some programs have instructions it lacks."""
    try:
        return collectives(program.as_text())
    except Exception as error:
        if "INTERNAL" not in str(error):
            raise
        return None


def _said(message: str) -> str:
    first = message.splitlines()[0]
    return re.sub(r"^RESOURCE_EXHAUSTED:\s*(E\d+:\s*)?", "", first)
