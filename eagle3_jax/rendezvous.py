"""Processes meet at the coordinator's address before jax starts: whoever is missing is named, in bounded time.

jax itself ends a process that waits in vain by an abort, without a word on who was waited for. So process 0 listens at
the address first; the others say who they are; when all have come, each is told to go on, and the address is free for
jax. Whatever is wrong is told to everyone who has come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time

from eagle3_jax.errors import UserError

GREETING = "eagle3"
GO = "go"
_PATIENCE = 5.0  # seconds for a connection to say who it is: others than ours may knock


class MeetingError(UserError):
    """The processes of a run did not come together."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Which process this is, of how many, and where process 0 listens. timeout: seconds to wait for each other."""

    host: str
    port: int
    num_processes: int
    process_id: int
    timeout: float

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def meet(cluster: Cluster) -> None:
    """Returns in every process once all have come.

    Raises:
      MeetingError: the address cannot be reached or listened at, somebody is missing when the time is up, or two
        processes disagree on who they are; it says which.
    """
    if cluster.num_processes == 1:
        return
    if cluster.process_id == 0:
        _gather(cluster)
    else:
        _join(cluster)


# --------------------------------------------------------------------------------------------------- process 0


def _gather(cluster: Cluster) -> None:
    deadline = time.monotonic() + cluster.timeout
    present: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        try:
            with _listen(cluster) as server:
                while len(present) < cluster.num_processes - 1:
                    connection = stack.enter_context(_accept(server, deadline, cluster, present))
                    if (number := _who(connection, cluster, present)) is not None:
                        present[number] = connection
        except MeetingError as error:
            _tell(present.values(), str(error))
            raise
        _tell(present.values(), GO)


def _listen(cluster: Cluster) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", cluster.port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
    except OSError as error:
        raise MeetingError(
            f"process 0 cannot listen at port {cluster.port} ({error.strerror or error}): another program has it; "
            "choose another port in --coordinator, the same for all"
        ) from error


def _accept(
    server: socket.socket, deadline: float, cluster: Cluster, present: dict[int, socket.socket]
) -> socket.socket:
    server.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        return server.accept()[0]
    except TimeoutError:
        missing = sorted(set(range(1, cluster.num_processes)) - set(present))
        raise MeetingError(
            f"{_names(missing)} of {cluster.num_processes} did not come to {cluster.address} within "
            f"{cluster.timeout:g} s; start every process with the same --coordinator and --num-processes, and see that "
            "its host can reach this one"
        ) from None


def _who(connection: socket.socket, cluster: Cluster, present: dict[int, socket.socket]) -> int | None:
    """The process at the other end; None if it is none of ours."""
    try:
        connection.settimeout(_PATIENCE)
        greeting, number, count = json.loads(_read_line(connection))
    except (OSError, ValueError, TypeError):
        return None
    if greeting != GREETING:
        return None
    if count != cluster.num_processes or not 0 < number < count or number in present:
        problem = (
            f"process {number} of {count} came to a run of {cluster.num_processes} processes"
            if count != cluster.num_processes
            else f"two processes came as process {number} of {count}"
        )
        wrong = MeetingError(f"{problem}; give all the same --num-processes, and each its own --process-id")
        _tell([connection], str(wrong))
        raise wrong
    return int(number)


def _tell(connections: object, text: str) -> None:
    for connection in list(connections):  # type: ignore[call-overload]
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(text).encode() + b"\n")


def _names(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"


# ------------------------------------------------------------------------------------------------ the others


def _join(cluster: Cluster) -> None:
    deadline = time.monotonic() + cluster.timeout
    with _connect(cluster, deadline) as connection:
        try:
            connection.sendall(json.dumps([GREETING, cluster.process_id, cluster.num_processes]).encode() + b"\n")
            connection.settimeout(max(deadline - time.monotonic(), 0.01) + _PATIENCE)  # process 0 may have come later
            answer = json.loads(_read_line(connection))
        except (OSError, ValueError) as error:
            raise MeetingError(
                f"process {cluster.process_id}: {cluster.address} gave no answer ({error}); see what process 0 says, "
                "or whether another program has that port"
            ) from error
    if answer != GO:
        raise MeetingError(str(answer))


def _connect(cluster: Cluster, deadline: float) -> socket.socket:
    """Tries until the time is up: process 0 may start later."""
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((cluster.host, cluster.port), timeout=max(left, 0.01))
        except OSError as error:
            if left <= 0.2:
                raise MeetingError(
                    f"process {cluster.process_id}: no coordinator at {cluster.address} within {cluster.timeout:g} s "
                    f"({error.strerror or error}); start process 0 on that host, and see that its name and port "
                    "are right and can be reached from here"
                ) from error
        time.sleep(min(0.2, max(left, 0)))


def _read_line(connection: socket.socket) -> str:
    """Up to the end of a line."""
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(4096)
        if not piece:
            raise ValueError("closed")
        text += piece
        if len(text) > 65536:
            raise ValueError("no line")
    return text.decode()
