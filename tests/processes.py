"""Real processes of one run, on this machine: `eagle3` several times, each with its own CPU devices."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import ROOT

Words = Sequence[str | Path]

TIMEOUT = 300  # seconds after which a test gives up, on however busy a machine

# One command after another, in a process that sends itself a signal while it fetches the batch of a step.
STOPPED = """
import os, sys
step, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
from train.data.batches import Batches
fetch = Batches.__getitem__
def fetch_and_signal(self, at):
    if at == step:
        os.kill(os.getpid(), number)
    return fetch(self, at)
Batches.__getitem__ = fetch_and_signal
from eagle3_jax.cli import main
from itertools import groupby
for is_end, words in groupby(sys.argv[1:], lambda word: word == "+"):
    if not is_end and (status := main(list(words))):
        sys.exit(status)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """Starts a process for each of `commands`, which says what it runs, one `eagle3` after another.

    stop: {process: (step, signal)}, for training.
    """

    def __init__(
        self, commands: Sequence[Sequence[Words]], folder: Path, *, devices: int = 1, peer_timeout: int = 60,
        stop: dict[int, tuple[int, signal.Signals]] | None = None,
    ) -> None:  # fmt: skip
        port, self.folder, self.running = free_port(), folder, list[subprocess.Popen[bytes]]()
        folder.mkdir(parents=True, exist_ok=True)
        for i, (first, *more) in enumerate(commands):
            step, number = (stop or {}).get(i, (-1, signal.SIGTERM))
            flags = [
                *("--coordinator", f"127.0.0.1:{port}", "--num-processes", str(len(commands))),
                *("--process-id", str(i), "--peer-timeout", str(peer_timeout)),
            ]
            words = [*first, *flags, *(word for then in more for word in ("+", *then))]
            command = [sys.executable, "-c", STOPPED, str(step), str(int(number)), *map(str, words)]
            with self._file(i, "out").open("wb") as out, self._file(i, "err").open("wb") as err:
                self.running.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment(devices), stdout=out, stderr=err)
                )

    def _file(self, process: int, name: str) -> Path:
        return self.folder / f"{name}.{process}"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        """What still runs is killed."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()

    def wait(self) -> list[int]:
        """Exit statuses; negative for a signal."""
        return [process.wait(TIMEOUT) for process in self.running]

    def out(self, process: int) -> str:
        """What it printed, without the lines of the library that connects CPUs."""
        lines = self._file(process, "out").read_text().splitlines()
        return "\n".join(line for line in lines if not line.startswith("[Gloo]"))

    def err(self, process: int) -> str:
        return self._file(process, "err").read_text()


def environment(devices: int) -> dict[str, str]:
    """This test's, with its compilation cache. Programs are not optimised: most of the time is compilation."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
