"""Being told to stop: by a signal to this process, or to any of those that compute together."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass
class Interrupt:
    """Set by a signal; the loop finishes its step, saves and leaves. A second Ctrl-C does not wait."""

    signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catches SIGTERM and SIGINT for the time of the block (in the main thread; elsewhere signals are not ours)."""
    flag, old = Interrupt(), {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            old[number] = signal.signal(number, flag)
    except ValueError:
        pass
    try:
        yield flag
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Agreement:
    """Makes all processes stop after the same step, whichever of them a signal reaches.

    Each step every process puts in what it was told, and takes out what any was told by the step before: the devices
    are not waited for longer than for that step's metrics.
    """

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        self._asked: jax.Array | None = None
        everyone = Mesh(np.array(jax.devices()), ("all",))
        self._spread = NamedSharding(everyone, PartitionSpec("all"))
        self._max = jax.jit(jnp.max, out_shardings=NamedSharding(everyone, PartitionSpec()))

    def ask(self, told: int | None) -> int | None:
        """Called once a step with this process's signal; the signal that ends the run after this step, or None."""
        if not self._several:
            return told
        before, mine = self._asked, np.full(1, told or 0, np.int32)
        self._asked = self._max(jax.make_array_from_callback((jax.device_count(),), self._spread, lambda _: mine))
        return None if before is None else int(jax.device_get(before)) or None
