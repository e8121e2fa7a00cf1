"""Start-up of several processes: what the flags say, and how processes meet, or do not."""

from __future__ import annotations

import argparse
import socket
import threading
from typing import Any

import jax
import numpy as np
import pytest

from eagle3_jax import distributed
from eagle3_jax.cli import main
from eagle3_jax.errors import UserError
from eagle3_jax.rendezvous import Cluster, MeetingError, meet
from eagle3_jax.sharding import make_mesh
from tests.processes import free_port


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    return parser.parse_args(flags)


FLAGS = ("--coordinator", "node0:8476", "--num-processes", "4", "--process-id", "3")


def test_flags_come_before_the_environment() -> None:
    assert distributed.cluster_of(parse(), {}) is None
    assert distributed.cluster_of(parse(*FLAGS), {}) == Cluster("node0", 8476, 4, 3, 60)
    environ = {
        "JAX_COORDINATOR_ADDRESS": "[fd00::1]:99", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0",
        "EAGLE3_PEER_TIMEOUT": "7",
    }  # fmt: skip
    found = distributed.cluster_of(parse(), environ)
    assert found == Cluster("fd00::1", 99, 2, 0, 7) and found.address == "[fd00::1]:99"
    assert distributed.cluster_of(parse(*FLAGS), environ) == Cluster("node0", 8476, 4, 3, 7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--coordinator", "node0:8476"), "--num-processes, --process-id missing"),
        ((*FLAGS, "--process-id", "4"), "--process-id 4 is not one of --num-processes 4: 0 to 3"),
        ((*FLAGS, "--coordinator", "node0"), "node0 is not HOST:PORT"),
        ((*FLAGS, "--peer-timeout", "0"), "--peer-timeout 0"),
    ],
)
def test_flags_that_make_no_sense(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        distributed.cluster_of(parse(*flags), {})


def test_an_environment_that_makes_no_sense() -> None:
    with pytest.raises(UserError, match="JAX_NUM_PROCESSES=two is no whole number"):
        distributed.cluster_of(parse("--coordinator", "a:1", "--process-id", "0"), {"JAX_NUM_PROCESSES": "two"})


def meet_all(clusters: list[Cluster]) -> list[str]:
    """What each was told, "" if it may go on."""
    told = [""] * len(clusters)

    def one(i: int) -> None:
        try:
            meet(clusters[i])
        except MeetingError as error:
            told[i] = str(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(clusters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def clusters(*numbers: int, of: int = 3, timeout: float = 30) -> list[Cluster]:
    port = free_port()
    return [Cluster("127.0.0.1", port, of, number, timeout) for number in numbers]


def test_all_meet_whatever_else_knocks() -> None:
    asked = clusters(1, 0, 2)

    def knock() -> None:
        for _ in range(200):
            try:
                with socket.create_connection(("127.0.0.1", asked[0].port), timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return
            except OSError:
                pass

    stranger = threading.Thread(target=knock)
    stranger.start()
    assert meet_all(asked) == ["", "", ""]
    stranger.join()
    assert meet_all(clusters(0, of=1)) == [""]


def test_whoever_is_missing_is_named_to_all() -> None:
    told = meet_all(clusters(0, 2, of=4, timeout=1))
    assert len(set(told)) == 1 and "processes 1, 3 of 4 did not come to 127.0.0.1:" in told[0]


def test_processes_that_disagree() -> None:
    zero, one = clusters(0, 1, of=2)
    told = meet_all([zero, Cluster(one.host, one.port, 5, 1, one.timeout)])
    assert "process 1 of 5 came to a run of 2 processes" in told[0] and told[0] == told[1]
    told = meet_all(clusters(0, 1, 1, of=3))
    assert "two processes came as process 1 of 3" in told[0]


def test_no_coordinator_and_no_free_port() -> None:
    (told,) = meet_all(clusters(1, timeout=0.5))
    assert "process 1: no coordinator at 127.0.0.1:" in told and "within 0.5 s" in told and "start process 0" in told
    (zero,) = clusters(0)
    with socket.create_server(("", zero.port)):
        assert f"process 0 cannot listen at port {zero.port}" in meet_all([zero])[0]


@pytest.mark.parametrize("command", [["generate", "Hello"], ["bench"], ["train", "r.yaml"],
                                     ["data", "regenerate", "p", "--target", "t", "--output", "o.jsonl"]])  # fmt: skip
def test_every_command_that_computes_says_that_it_found_no_coordinator(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"127.0.0.1:{free_port()}"
    flags = ["--coordinator", where, "--num-processes", "2", "--process-id", "1", "--peer-timeout", "1"]
    assert main([*command, *flags]) == 2
    assert f"no coordinator at {where} within 1 s" in capsys.readouterr().err


def test_a_host_without_a_tpu_is_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not distributed.is_pod({"TPU_WORKER_HOSTNAMES": "a,b"})
    monkeypatch.setattr(distributed, "_has_tpu", lambda: True)
    monkeypatch.setattr(distributed, "_metadata", {"worker-network-endpoints": "a:b:c", "tpu-env": ""}.__getitem__)
    assert not distributed.is_pod({}) and not distributed.is_pod({"TPU_WORKER_HOSTNAMES": "localhost"})
    assert not distributed.is_pod({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"})
    assert distributed.is_pod({"TPU_WORKER_HOSTNAMES": "a,b"})
    assert distributed.is_pod({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"})
    said = {"worker-network-endpoints": "a", "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\n"}
    monkeypatch.setattr(distributed, "_metadata", said.__getitem__)
    assert distributed.is_pod({})


def test_processes_without_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = make_mesh(data=2)
    distributed.check_all_take_part(mesh, "mesh")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(UserError, match="mesh uses 2 of the 8 devices of 4 processes, and so 3 of these"):
        distributed.check_all_take_part(mesh, "mesh")


def test_one_process_has_everything() -> None:
    place = jax.sharding.NamedSharding(make_mesh(data=2), jax.sharding.PartitionSpec("data"))
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    spread = distributed.spread(x, place)
    assert spread.sharding == place and np.array_equal(distributed.to_host({"x": spread})["x"], x)
    assert distributed.from_first(7) == 7
