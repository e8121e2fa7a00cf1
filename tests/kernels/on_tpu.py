"""How TPU kernels are tested without a TPU: by interpretation that looks for races, and by the real compiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


def interpreted(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The kernel's results. Memory that nobody wrote is NaN, a copy is done when waited for, and a race is an error."""
    how = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
    result = jax.block_until_ready(kernel(*args, interpret=how, **options))
    races = interpret_pallas_call.races
    assert races is not None, "races were not looked for"
    assert not races.races_found, "the kernel races with itself: see the output above"
    return result


def copies(compiled: Any, array: Any) -> list[str]:
    """Instructions of a compiled program that copy an array of this shape, to whatever memory."""
    shape = ",".join(map(str, array.shape))
    return [
        line.strip()[:200] for line in compiled.as_text().splitlines() if re.search(rf"\[{shape}\]\S* copy\(", line)
    ]
