"""The merge around cuDNN's two passes, with plain forms in their place: value and gradients of the dense form."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels import dispatch, proof
from pallas_kernels.attention import branch, branch_attention, branch_cudnn, cudnn
from tests.helpers import assert_close
from tests.kernels.test_branch_attention import dense


def probabilities(q: Array, k: Array, mask: Array | None, log_sum: Array | None) -> tuple[Array, Array]:
    """Weights [B,N,T,S] under a given or their own log-sum-exp [B,N,T], and that."""
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)) * q.shape[-1] ** -0.5
    visible = jnp.tri(q.shape[1], dtype=bool)[None, None]
    scores = jnp.where(visible if mask is None else visible & mask, scores, -1e30)
    log_sum = jax.nn.logsumexp(scores, axis=-1) if log_sum is None else log_sum
    return jnp.exp(scores - log_sum[..., None]), log_sum


def plain_forward(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array]:
    p, log_sum = probabilities(q, k, mask, None)
    return jnp.einsum("BNTS,BSNH->BTNH", p, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)), log_sum


def plain_backward(q: Array, k: Array, v: Array, mask: Any, log_sum: Array, out: Array, slope: Array) -> Any:
    """As flash attention computes it: from the log-sum-exp and the output that it is given."""
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    p, _ = probabilities(q, k, mask, log_sum)
    mean = jnp.sum(slope * out, axis=-1)
    ds = p * (jnp.einsum("BTNH,BSNH->BNTS", slope, wide_v) - jnp.moveaxis(mean, 1, 2)[..., None])
    ds = ds * q.shape[-1] ** -0.5
    narrow = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)
    dk, dv = jnp.einsum("BNTS,BTNH->BSNH", ds, q), jnp.einsum("BNTS,BTNH->BSNH", p, slope)
    return jnp.einsum("BNTS,BSNH->BTNH", ds, wide_k), narrow(dk), narrow(dv)


def runs_of(level: cudnn.Level) -> list[tuple[int, int, int, int]]:
    """(row, slot, start, end) of those that are."""
    starts, lengths = np.asarray(level.starts), np.asarray(level.lengths)
    return [(b, m, starts[b, m], starts[b, m] + lengths[b, m]) for b, m in zip(*np.nonzero(lengths), strict=True)]


def level_mask(level: cudnn.Level) -> Array:
    number = np.zeros(level.own.shape, np.int32)
    for b, m, start, end in runs_of(level):
        number[b, start:end] = m + 1
    return jnp.asarray(number[:, :, None] == number[:, None, :])[:, None]


def only(level: cudnn.Level, x: Array) -> Array:
    return jnp.where(level.own[..., None, None], x, jnp.nan)


def cudnn_forward(q: Array, k: Array, v: Array, segments: Any) -> tuple[Array, Array]:
    """As cuDNN does it: what is of no run of the level is left as it was."""
    if not isinstance(segments, cudnn.Level):
        return plain_forward(q, k, v, segments)
    out, log_sum = plain_forward(q, k, v, level_mask(segments))
    found = np.full((*segments.starts.shape, q.shape[2], q.shape[1] // segments.cut), np.nan, np.float32)
    for b, m, start, end in runs_of(segments):
        found[b, m, :, : end - start] = log_sum[b, :, start:end]
    return only(segments, out), jnp.asarray(found).reshape(-1, *found.shape[2:])


def cudnn_backward(q: Array, k: Array, v: Array, segments: Any, log_sum: Array, out: Array, slope: Array) -> Any:
    if not isinstance(segments, cudnn.Level):
        return plain_backward(q, k, v, segments, log_sum, out, slope)
    given = np.asarray(log_sum).reshape(*segments.starts.shape, *log_sum.shape[1:])
    assert np.isfinite(given).all()
    together = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    for b, m, start, end in runs_of(segments):
        together[b, :, start:end] = given[b, m, :, : end - start]
    found = plain_backward(q, k, v, level_mask(segments), jnp.asarray(together), out, slope)
    return tuple(only(segments, x) for x in found)


@pytest.fixture
def without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for cuDNN looks at numbers, so that nothing of it may be traced."""
    monkeypatch.setattr(cudnn, "check", lambda *_, **__: None)
    monkeypatch.setattr(cudnn, "_SHORTEST", 2)
    monkeypatch.setattr(branch_cudnn.lax, "cond", lambda which, yes, no, *args: yes(*args) if which else no(*args))
    monkeypatch.setattr(branch_cudnn, "cudnn_forward", cudnn_forward)
    monkeypatch.setattr(branch_cudnn, "cudnn_backward", cudnn_backward)


PACKED = [
    [1] * 13 + [2] * 5 + [3] * 9 + [4] + [5] + [6] * 2 + [0],
    [1] * 32,
    [1] * 8 + [2] * 8 + [3] * 8 + [4] * 7 + [5],
]


@pytest.mark.parametrize("packed", [None, "mask", "runs"])
@pytest.mark.parametrize("steps", [1, 3])
def test_merge_equals_the_reference(steps: int, packed: str | None, without_cudnn: None) -> None:
    shapes = [(3, 32, 4, 8)] + [(3, 32, 2, 8)] * (2 * steps)
    q, *rest = (2 * jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))
    keys, values, slope = rest[:steps], rest[steps:], jax.random.normal(jax.random.key(99), q.shape)
    ids = jnp.asarray(PACKED, jnp.int32) if packed else None
    way = branch_cudnn.by_runs if packed == "runs" else branch_cudnn.by_mask

    def wanted(q: Array, keys: list[Array], values: list[Array]) -> Array:
        if ids is None:
            return dense(q, keys, values)
        return branch_attention(q, keys, values, segment_ids=ids, implementation="reference")

    ours: Any = lambda q, k, v: way(q, k, v, ids)  # type: ignore[arg-type]
    (got, pull), (want, pull_wanted) = (jax.vjp(f, q, keys, values) for f in (ours, wanted))
    assert_close(got, want)
    for a, b in zip(jax.tree.leaves(pull(slope)), jax.tree.leaves(pull_wanted(slope)), strict=True):
        assert_close(a, b)


def test_runs_are_what_segments_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_SHORTEST", 2)
    runs = cudnn.Runs.of(jnp.asarray(PACKED, jnp.int32))
    whole, quarter, least = ([(b, int(s), int(e)) for b, _, s, e in runs_of(level)] for level in runs.levels)
    assert bool(runs.fit) and [level.cut for level in runs.levels] == [1, 4, 16]
    assert whole == [(0, 0, 13), (0, 18, 27), (1, 0, 32)]
    assert quarter == [(0, 13, 18), (2, 0, 8), (2, 8, 16), (2, 16, 24), (2, 24, 31)]
    assert least == [(0, 27, 28), (0, 28, 29), (0, 29, 31), (0, 31, 32), (2, 31, 32)]
    assert (np.sum([level.own for level in runs.levels], axis=0) == 1).all()
    log_sum = jax.random.normal(jax.random.key(0), (3, 2, 32))
    for level in runs.levels:
        again = level.by_token(level.by_run(log_sum))
        assert_close(jnp.where(level.own[:, None], again, 0), jnp.where(level.own[:, None], log_sum, 0), 0)


@pytest.mark.parametrize("tokens", [1, 31, 128, 4096, 32768])
def test_no_level_but_the_last_is_ever_full(tokens: int) -> None:
    ids = np.concatenate([np.repeat(np.arange(n), tokens // n + 1)[None, :tokens] for n in (1, 3, 4, 5, 16, 17, 64)])
    ids = np.concatenate([ids, np.sort(np.random.default_rng(0).integers(0, 20, (5, tokens)), axis=1)])
    *levels, last = cudnn.Runs.of(jnp.asarray(ids, jnp.int32)).levels
    for level in levels:
        assert int(jnp.max(jnp.sum(level.lengths > 0, axis=1))) < 4 * level.cut == level.starts.shape[1]
        assert int(jnp.max(level.lengths)) <= tokens // level.cut
    assert tokens % last.cut == 0 and (tokens < 4096 or last.cut == 64)


@pytest.mark.parametrize(("short", "way"), [(7, "Runs"), (16, "Runs"), (17, "mask"), (17, "blocks")])
def test_rows_of_too_many_segments_go_another_way(
    short: int, way: str, without_cudnn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "_SHORTEST", 16)
    monkeypatch.setattr(cudnn, "_LONGEST_MASKED", 32 if way == "blocks" else 64)
    took, merged = [], branch_cudnn.merged

    def noted(*args: Any) -> Array:
        took.append("Runs" if isinstance(args[0], cudnn.Runs) else "mask")
        return merged(*args)

    monkeypatch.setattr(branch_cudnn, "merged", noted)
    q = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
    ids = jnp.minimum(jnp.arange(64)[None] // 2, short).astype(jnp.int32)  # short ones of two tokens, and a long one
    got = branch_cudnn.by_runs(q, [q], [q], ids)
    wanted = lambda q: branch_attention(q, [q, 2 * q], [q, q], segment_ids=ids, implementation="reference")
    assert_close(got, branch_attention(q, [q], [q], segment_ids=ids, implementation="reference"))
    assert took == ([] if way == "blocks" else [way])
    ours = lambda q: branch_cudnn.by_runs(q, [q, 2 * q], [q, q], ids)
    slopes, wanted_slopes = (jax.grad(lambda q, f=f: jnp.sum(f(q) ** 2))(q) for f in (ours, wanted))
    assert_close(slopes, wanted_slopes)


def test_what_cudnn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_SHORTEST", 8)
    q, k = jnp.zeros((3, 32, 4, 8)), jnp.zeros((3, 32, 2, 8))
    whole, quarter = cudnn.Runs.of(jnp.asarray(PACKED, jnp.int32)).levels
    for level, number in ((whole, 4), (quarter, 16)):
        _, options, (rows, *_, lengths, _, offsets, key_offsets, _, _) = branch_cudnn._cudnn(q, k, k, level)
        assert options["mask_type"].name == "PADDING_CAUSAL" and rows.shape == (3 * level.cut, 32 // level.cut, 4, 8)
        assert lengths.shape == (3 * level.cut, number // level.cut) and lengths.sum() == level.own.sum()
        assert offsets.shape == (3 * level.cut, number // level.cut + 1)
        flat, places = np.asarray(offsets).reshape(-1), np.asarray(lengths).reshape(-1)
        told = [(int(start) // (4 * 8), int(n)) for start, n in zip(flat, places, strict=False) if n]
        assert told == [(32 * b + start, end - start) for b, _, start, end in runs_of(level)]
        assert (np.asarray(key_offsets) * 2 == np.asarray(offsets)).all()
        nobodys = flat[: places.size][places == 0], flat[places.size :]
        assert {int(start) // (4 * 8) for start in nobodys[0]} <= {32, 64, 96}, "an empty run begins at its row's end"
        assert set(nobodys[1].tolist()) == {3 * 32 * 4 * 8}


def lowered(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a GPU's compiler is given, of rows of two levels; cuDNN itself is not needed for that."""
    monkeypatch.setattr(cudnn, "check", lambda *_, **__: None)
    at = lambda heads: jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16)
    attend = lambda q, k, v, ids: branch_cudnn.by_runs(q, [k], [v], ids)
    slopes = lambda q, k, v, s, ids: jax.vjp(lambda *qkv: attend(*qkv, ids), q, k, v)[1](s)
    ids, rows = jax.ShapeDtypeStruct((2, 128), jnp.int32), (at(4), at(2), at(2))
    traced = jax.jit(slopes).trace(*rows, at(4), ids) if gradient else jax.jit(attend).trace(*rows, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("gradient", [False, True])
def test_what_a_gpu_is_given(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "__cudnn$fmhaSoftmax" + ("Backward" if gradient else "")
    calls = [line for line in lowered(gradient, monkeypatch).splitlines() if f"@{name}(" in line]
    runs = [line for line in calls if "PADDING_CAUSAL" in line]
    assert len(runs) == 2 and all(re.search(r"max_seg_per_batch\\22: 4\b", line) for line in runs)
    for line, cut in zip(runs, (1, 4), strict=True):
        query, key = (f"tensor<{2 * cut}x{128 // cut}x{heads}x64xbf16>" for heads in (4, 2))
        summed = f"tensor<{2 * 4 * cut}x4x{128 // cut}xf32>"
        numbers = [f"tensor<{2 * cut}x{n}xi32>" for n in (4, 4, 5, 5)]
        given = [query, key, key, summed, query, query, *numbers] if gradient else [query, key, key, *numbers]
        assert f"({', '.join(given)}) -> " in line


def test_the_gradient_is_given_slope_and_output_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of one shape: which is which shows in the order of what jax's primitive takes."""
    taken: list[Any] = []
    from jax._src.cudnn import fused_attention_stablehlo as module

    for name in ("_dot_product_attention_bwd_p", "_dot_product_attention_bwd_p_wrapper"):
        stub = types.SimpleNamespace(bind=lambda *args, **_: taken.append(args[10:]) or args[:3])
        monkeypatch.setattr(module, name, stub)
    q, k = jnp.zeros((3, 32, 4, 8), jnp.bfloat16), jnp.zeros((3, 32, 2, 8), jnp.bfloat16)
    out, slope, log_sum = q + 1, jnp.full(q.shape, 2.0), jnp.zeros((3, 4, 32), jnp.bfloat16)
    for segments in (None, cudnn.Runs.of(jnp.asarray(PACKED, jnp.int32)).levels[0]):
        monkeypatch.setattr(branch_cudnn.lax, "cond", lambda which, yes, no, *args: yes(*args))
        runs = None if segments is None else cudnn.Runs((segments,), jnp.bool_(True))
        branch_cudnn.flash_backward(q, k, k, runs, log_sum, out, slope)
        sums, first, second = taken.pop()
        assert sums.dtype == jnp.float32 and first.dtype == second.dtype == jnp.bfloat16
        assert (first == 1).all() and (second == 2).all()


def test_nothing_as_large_as_a_mask_is_kept_for_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check", lambda *_, **__: None)
    at = lambda heads: jax.ShapeDtypeStruct((2, 512, heads, 8), jnp.bfloat16)

    def kept(q: Array, k: Array, v: Array, ids: Array) -> Any:
        return jax.vjp(lambda *qkv: branch_cudnn.by_runs(qkv[0], [qkv[1]], [qkv[2]], ids), q, k, v)[1]

    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    arrays = jax.tree.leaves(jax.eval_shape(kept, at(4), at(2), at(2), ids))
    inputs = 2 * 512 * (4 + 2 + 2) * 8
    assert sum(x.size for x in arrays) <= inputs + 2 * 512 * (4 * 8 + 4 + 1), "inputs, output, log-sum-exps and ids"


@pytest.mark.parametrize(
    ("ids", "spread", "works", "proven", "called"),
    [
        (True, False, True, ["packed rows by their runs"], "by_runs"),
        (True, False, False, ["packed rows by their runs", "branch_attention by cuDNN"], "by_mask"),
        (True, True, True, ["branch_attention by cuDNN"], "by_mask"),
        (False, False, True, ["branch_attention by cuDNN"], "by_mask"),
    ],
)
def test_which_way_is_chosen_and_proven_before(
    ids: bool, spread: bool, works: bool, proven: list[str], called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def require(name: str, *_: Any) -> None:
        asked.append(name.removesuffix(" on this GPU"))
        if not works and "runs" in name:
            raise NotImplementedError("it differs")

    monkeypatch.setattr(cudnn, "check", lambda *_, **__: None)
    monkeypatch.setattr(proof, "require", require)
    for name in ("by_runs", "by_mask"):
        monkeypatch.setattr(branch_cudnn, name, lambda *_, name=name: name)
    q = jnp.zeros((1, 8, 2, 8), jnp.bfloat16)
    with dispatch.spread() if spread else contextlib.nullcontext():
        found: Any = branch_attention(q, [q], [q], segment_ids=jnp.ones((1, 8), jnp.int32) if ids else None)
    assert found == called and asked == proven


@pytest.mark.parametrize(
    ("capability", "width", "packed", "fits"),
    [((8, 0), 128, False, True), ((8, 0), 256, False, False), ((8, 0), 128, True, False), ((9, 0), 256, True, True),
     ((9, 0), 264, False, False), ((9, 0), 100, False, False)],
)  # fmt: skip
def test_what_a_gpu_can_do_is_asked_of_jax(
    capability: tuple[int, int], width: int, packed: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax._src.cudnn import fused_attention_stablehlo as module

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    reached = lambda wanted: capability >= tuple(map(int, wanted.split(".")))
    monkeypatch.setattr(module, "check_compute_capability", reached)
    monkeypatch.setattr(module, "is_cuda_compute_capability_equal", lambda _: False)
    q = jnp.zeros((1, 8, 2, width), jnp.bfloat16)
    with contextlib.nullcontext() if fits else pytest.raises(NotImplementedError):
        cudnn.check(q, q, packed)
    with pytest.raises(NotImplementedError, match="not float32"):
        cudnn.check(q.astype(jnp.float32), q)


@pytest.mark.parametrize("way", [branch_cudnn.by_mask, branch_cudnn.by_runs])
def test_the_case_by_which_it_is_proven_tells_right_from_wrong(
    way: Callable[..., Array], without_cudnn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "jit", lambda f: f)
    kernel, plain = (branch_cudnn.with_gradients(f) for f in (way, branch.branch_attention))
    assert proof._verdict(kernel, plain, branch_cudnn.small_case, 2e-2) is None
    right = branch_cudnn.cudnn_backward
    wrong = lambda *args: right(*args[:-1], 1.1 * args[-1])
    monkeypatch.setattr(branch_cudnn, "cudnn_backward", wrong)
    assert "differs from the reference" in str(proof._verdict(kernel, plain, branch_cudnn.small_case, 2e-2))


def test_where_runs_cannot_be_told() -> None:
    with dispatch.spread(), pytest.raises(NotImplementedError, match="not for a mesh"):
        cudnn.check_runs(jnp.zeros((1, 8, 4, 8), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="int32"):
        cudnn.check_runs(jax.ShapeDtypeStruct((64, 32768, 32, 128), jnp.bfloat16))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="too large"):
        cudnn.check_mask(jax.ShapeDtypeStruct((1, 32768, 32, 128), jnp.bfloat16))  # type: ignore[arg-type]
