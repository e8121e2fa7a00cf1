"""One program in several processes, each with its own devices: start-up, who speaks, and how it ends when one is lost.

On one host nothing happens. On a TPU slice of several hosts jax knows the others by itself. Elsewhere the flags below,
or the environment, say where process 0 listens, how many processes there are and which this is. All run the same
command; process 0 alone prints and writes files.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import re
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding

from eagle3_jax.errors import UserError
from eagle3_jax.rendezvous import Cluster, meet

AUTO = "auto"
ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS", "num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID",
    "peer_timeout": "EAGLE3_PEER_TIMEOUT",
}  # fmt: skip
PEER_TIMEOUT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that computes."""
    group = parser.add_argument_group(
        "several hosts", f"the same command on each; or as {', '.join(ENVIRONMENT.values())}; needless on TPU slices"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 runs, and a free port there; or auto"
                       " under Slurm and Open MPI")  # fmt: skip
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I", help="of this process, from 0")
    group.add_argument("--peer-timeout", type=int, metavar="SECONDS",
                       help=f"how long to wait for a process that is silent (default: {PEER_TIMEOUT})")  # fmt: skip


@contextlib.contextmanager
def session(args: argparse.Namespace) -> Iterator[None]:
    """Joins the other processes, if there are any, for the time of the block; in all but process 0 it is silent.

    An error ends this process at once, so that the others are not left waiting: they end within the peer timeout.

    Raises:
      UserError: flags that make no sense, or the processes did not come together.
    """
    if not _start(args) or jax.process_count() == 1:
        yield
        return
    try:
        with _silent_unless_first():
            yield
    except BaseException as error:
        _leave(error)


def is_first() -> bool:
    """Whether this process writes files."""
    return jax.process_index() == 0


def to_host(tree: Any) -> Any:
    """Arrays as numpy, whichever processes hold parts of them. Every process must call it, and gets all."""

    def fetch(x: Any) -> Any:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return jax.device_get(x)

    return jax.tree.map(fetch, tree)


def spread(x: Any, place: Sharding) -> jax.Array:
    """An array that every process has whole, laid out over the devices of all.

    As `jax.device_put`, which however sends such an array to every host and compares.
    """
    if place.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, place)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])


def from_first(value: np.ndarray | int) -> np.ndarray:
    """Process 0's value of an array or number that has the same shape in every process. All must call it."""
    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def check_all_take_part(mesh: Mesh | None, flag: str) -> None:
    """Raises UserError if a process has no device in `mesh`, which `flag` describes."""
    if (count := jax.process_count()) == 1:
        return
    inside = {device.process_index for device in mesh.devices.flat} if mesh is not None else set()
    if len(inside) < count:
        used = 1 if mesh is None else mesh.size
        raise UserError(
            f"{flag} uses {used} of the {jax.device_count()} devices of {count} processes, and so "
            f"{count - max(len(inside), 1)} of these would have nothing to do; spread over all devices, or start fewer "
            "processes"
        )


# --------------------------------------------------------------------------------------------------- start-up


def cluster_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """What the flags, or else the environment, say; None if they say nothing.

    Raises:
      UserError: part of it is missing, or makes no sense.
    """
    given = {name: _given(args, name, environ) for name in ("coordinator", "num_processes", "process_id")}
    if all(value is None for value in given.values()):
        return None
    if missing := [_flag(name) for name, value in given.items() if value is None]:
        raise UserError(f"{', '.join(missing)} missing: several processes need --coordinator, --num-processes and "
                        "--process-id")  # fmt: skip
    host, port = _address(str(given["coordinator"]))
    count, number = (_whole_number(given[name], name) for name in ("num_processes", "process_id"))
    if count < 1:
        raise UserError(f"--num-processes {count} is below 1")
    if not 0 <= number < count:
        raise UserError(f"--process-id {number} is not one of --num-processes {count}: 0 to {count - 1}")
    return Cluster(host, port, count, number, peer_timeout(args, environ))


def peer_timeout(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Seconds that a process may be silent."""
    value = _given(args, "peer_timeout", environ)
    seconds = PEER_TIMEOUT if value is None else _whole_number(value, "peer_timeout")
    if seconds < 1:
        raise UserError(f"--peer-timeout {seconds} is below 1 second")
    return seconds


def _given(args: argparse.Namespace, name: str, environ: Mapping[str, str]) -> Any:
    value = getattr(args, name, None)
    return environ.get(ENVIRONMENT[name]) or None if value is None else value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _whole_number(value: Any, name: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{ENVIRONMENT[name]}={value} is no whole number") from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator {text} is not HOST:PORT, such as 10.0.0.1:8476")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _start(args: argparse.Namespace) -> bool:
    """Starts jax.distributed where there are several processes. Whether it runs."""
    if jax.distributed.is_initialized():
        return True
    if _given(args, "coordinator", os.environ) == AUTO or (cluster := cluster_of(args)) is None:
        found = getattr(args, "coordinator", None) == AUTO or is_pod()
        return found and _initialize(peer_timeout(args))
    meet(cluster)
    return _initialize(
        int(cluster.timeout), coordinator_address=cluster.address, num_processes=cluster.num_processes,
        process_id=cluster.process_id, cluster_detection_method="deactivate",
    )  # fmt: skip


def _initialize(timeout: int, **keywords: Any) -> bool:
    # jax's preemption service would take SIGTERM for itself, and commands that ask it nothing would not end.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not keywords:
        print(f"waiting for the other hosts, at most {timeout} s", file=sys.stderr)
    try:
        jax.distributed.initialize(initialization_timeout=timeout, heartbeat_timeout_seconds=timeout, **keywords)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"the processes did not come together: {error}; name them with --coordinator, --num-processes "
                        "and --process-id") from error  # fmt: skip
    return True


# ---------------------------------------------------------------------------------------------------- TPU slices


def is_pod(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this host is one of several of a TPU slice, or its slice one of several."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if (platforms and "tpu" not in platforms.split(",")) or not _has_tpu():
        return False
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")  # GKE sets these
    hosts = _metadata("worker-network-endpoints") if hosts is None else hosts
    slices = environ.get("MEGASCALE_NUM_SLICES")
    if slices is None and (found := re.search(r"MEGASCALE_NUM_SLICES:\s*'?(\d+)", _metadata("tpu-env"))):
        slices = found[1]
    return "," in hosts or int(slices or 1) > 1


def _has_tpu() -> bool:
    """Whether chips are attached: a device file, and a PCI device of Google's."""
    if not glob.glob("/dev/accel[0-9]*") and not glob.glob("/dev/vfio/[0-9]*"):
        return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors)


def _metadata(name: str) -> str:
    """What the metadata server of a Cloud TPU VM says; "" where there is none."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.read().decode()
    except (OSError, ValueError):
        return ""


# ------------------------------------------------------------------------------------------- speaking and leaving


@contextlib.contextmanager
def _silent_unless_first() -> Iterator[None]:
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _leave(error: BaseException) -> NoReturn:
    """Ends the process without the farewell of jax, which would wait for processes that are gone or still computing."""
    text, status = _last_words(error)
    with contextlib.suppress(OSError):
        print(f"[process {jax.process_index()}] {text}", file=sys.__stderr__, flush=True)
        sys.stdout.flush()
    if is_first():
        time.sleep(1)  # the others, who may have met the same error, lose their coordinator with this process
    os._exit(status)


def _last_words(error: BaseException) -> tuple[str, int]:
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        return "leaving", error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, jax.errors.JaxRuntimeError):
        reason = str(error).splitlines()[0]
        return (
            f"error: {reason}\nif another process has ended, that is why: see what it said. Start all of them again "
            "with the same command; training goes on from its last checkpoint", 1,
        )  # fmt: skip
    return "".join(traceback.format_exception(error)).rstrip(), 1
