"""The benchmark of kernels: that what it measures can be made and compared, and what it says where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernels, profiling
from benchmarks.cases import TINY, Case, Sizes, Way, all_cases

SMALL = Sizes(1, 2, 8, 8, 4, 4, 2, 16, 64, 128, 32)


def test_a_row_for_every_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "Sizes", lambda: SMALL)
    kernels.main(["--tiny", "--only", "gated_delta.step", "B 2, W 3", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == report
    reference, gpu, triton, floor = report["rows"]
    assert reference["error"] < 1e-6 and reference["of_floor"] == reference["ms"] / floor["ms"]
    for kernel in (gpu, triton):
        assert kernel["reason"] == "NotImplementedError: this kernel is for GPUs" and "ms" not in kernel
    assert reference["bytes"] == 2 * 2 * 2 * 8 * 8 * 4, "one read and one write of a float32 state"


def test_a_way_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such engine\nin this library")

    case = Case(
        "op", "B 1", lambda key: (jnp.ones(3),), {"reference": Way(lambda x: 2 * x), "library": Way(broken)}, abs
    )
    monkeypatch.setattr(kernels, "all_cases", lambda sizes, grid: [case])
    kernels.main([])
    reference, library = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert reference["error"] == 1 and reference["ms"] > 0
    assert library["reason"] == "RuntimeError: no such engine"


def test_every_case_has_an_oracle_of_its_own_shape() -> None:
    operations = set()
    for case in all_cases(SMALL, TINY):
        made = jax.eval_shape(case.make, jax.random.key(0))
        got, want = (jax.eval_shape(function, *made) for function in (case.ways["reference"].run, case.exact))
        assert [x.shape for x in jax.tree.leaves(got)] == [x.shape for x in jax.tree.leaves(want)], case
        operations.add(case.operation)
    assert len(operations) == 15
    without_delta = all_cases(Sizes(key_heads=0), TINY)
    assert not any(case.operation.startswith(("gated_delta", "causal_conv")) for case in without_delta)


def test_the_error_of_a_result() -> None:
    want = (jnp.ones((2, 8)), jnp.arange(4))
    assert kernels.error(want, want) == 0
    assert abs(kernels.error((1.5 * want[0], want[1]), want) - 0.5) < 1e-6
    assert kernels.error((want[0], want[1].at[0].set(9)), want) == 0.25
    assert not kernels.error((want[0].at[0, 0].set(jnp.nan), want[1]), want) < 1


def test_words_that_no_row_contains() -> None:
    with pytest.raises(SystemExit, match="no row contains sorting; operations are .*gated_delta.chunked"):
        kernels.main(["--tiny", "--only", "sorting"])


def test_times_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels come by stream, not in the order of time."""
    events = [
        SimpleNamespace(start_ns=start, duration_ns=spent) for start, spent in ((0, 1), (20, 3), (5, 10), (25, 30))
    ]
    monkeypatch.setattr(profiling, "_planes", lambda folder: ["a device"])
    monkeypatch.setattr(profiling, "_kernels", lambda plane: iter(events))
    monkeypatch.setattr(jax.profiler, "trace", lambda folder: profiling.tempfile.TemporaryDirectory())
    assert profiling.call_times(lambda: None, 2) == [11, 33]
    assert profiling.call_times(lambda: None, 3) == [44 / 3] * 3
    events.clear()
    assert profiling.call_times(lambda: None, 2) == []
