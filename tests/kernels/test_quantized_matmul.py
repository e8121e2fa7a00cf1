"""Products with matrices in one byte: the kernel of GPUs interpreted, the reference, and which of them runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.quantization import Quantized, matmul
from pallas_kernels import dispatch, proof
from pallas_kernels.quantized_matmul import gpu, quantized_matmul, reference
from tests.helpers import as_float64, assert_close

INT8, E4M3 = jnp.int8, jnp.float8_e4m3fn
NARROW = gpu.Tiles(4, 1, splits=2)


def arguments(*shape: int, kind: Any, blocks: int, inputs: int = 256, outputs: int = 64) -> Any:
    """x [*shape, inputs] in bfloat16, values and scales."""
    rng = np.random.default_rng(len(shape))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    values = jnp.clip(normal(inputs, outputs) * 40, -127, 127).astype(kind)
    return normal(*shape, inputs).astype(jnp.bfloat16), values, jnp.exp(normal(blocks, outputs))


def exact(x: Any, values: Any, scale: Any) -> np.ndarray:
    every = np.repeat(as_float64(scale), len(values) // len(scale), axis=0)
    return as_float64(x) @ (as_float64(values) * every)


@pytest.mark.parametrize("kind", [INT8, E4M3])
@pytest.mark.parametrize(("shape", "blocks"), [((1,), 1), ((3,), 2), ((2, 8), 2), ((20,), 1), ((4, 1, 8), 2)])
def test_the_kernel_and_the_reference(kind: Any, shape: tuple[int, ...], blocks: int) -> None:
    args = arguments(*shape, kind=kind, blocks=blocks)
    want = exact(*args)
    for function in (partial(gpu.interpreted, tiles=NARROW), reference.quantized_matmul):
        got = function(*args, block=128)
        assert got.dtype == jnp.bfloat16 and got.shape == (*shape, 64)
        assert_close(got, want, 3e-3)  # of the one rounding


@pytest.mark.parametrize("tiles", [gpu.FEW, gpu.Tiles(16, 1), gpu.Tiles(8, 2, splits=1, dealt=4)])
def test_every_tile_finds_its_place(tiles: gpu.Tiles) -> None:
    """Inputs that are one at one place pick a row of the matrix, and columns have scales of their own."""
    _, values, scale = arguments(1, kind=INT8, blocks=1, inputs=128, outputs=512)
    picked = jnp.asarray([0, 1, 7, 8, 31, 32, 63, 64, 127])
    x = jax.nn.one_hot(picked, 128, dtype=jnp.bfloat16)
    got = gpu.interpreted(x, values, scale, block=0, tiles=tiles)
    assert jnp.array_equal(got, (values[picked] * scale).astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", [INT8, E4M3])
def test_the_case_by_which_it_is_proven(kind: Any) -> None:
    kernel, plain = (partial(f, block=gpu.SMALL_BLOCK) for f in (gpu.interpreted, reference.quantized_matmul))
    case = partial(gpu.small_case, 16, kind, kind == E4M3)
    assert proof._verdict(kernel, plain, case, 1e-2) is None
    wrong = lambda x, values, scale: kernel(x, values, scale[:, ::-1])
    assert proof._verdict(wrong, plain, case, 1e-2) is not None
    values = np.asarray(case()[1]).view(np.uint8)
    assert len(np.unique(values)) == (256 if kind == INT8 else 254)


def run_assembly(lines: list[str], **words: np.ndarray) -> dict[str, np.ndarray]:
    """The few instructions of PTX that the kernel has, on arrays of uint32."""
    halves = lambda word: word.view(jnp.bfloat16)  # of a word, the lower first
    byte = lambda a, b, i: (a if i < 4 else b) >> np.uint32(8 * (i % 4)) & np.uint32(255)
    do = {
        "prmt.b32": lambda a, b, s: sum(byte(a, b, int(s) >> 4 * i & 15) << np.uint32(8 * i) for i in range(4)),
        "lop3.b32": lambda a, b, c, table: (a & b) | c,  # table 0xea
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b,
        "sub.rn.bf16x2": lambda a, b: (halves(a) - halves(b)).view(np.uint32),
        "mul.rn.bf16x2": lambda a, b: (halves(a) * halves(b)).view(np.uint32),
        "mov.b32": lambda a: a,
    }
    for line in lines:
        name, out, *names = line.rstrip(";").replace(",", "").split()
        words[out] = do[name](*(words[x] if x in words else np.uint32(int(x, 0)) for x in names))
    return words


@pytest.mark.parametrize("kind", [INT8, E4M3])
def test_what_the_assembly_makes_of_every_byte(kind: Any) -> None:
    first = np.arange(256, dtype=np.uint8)
    second = first[::-1].copy()
    start, registers, *lines, end = gpu.assembly(kind).splitlines()
    assert start + end == "{}" and registers.startswith(".reg")
    words = run_assembly(lines, **{"$4": first.view(np.uint32), "$5": second.view(np.uint32)})
    got = np.stack([words[f"${i}"].view(jnp.bfloat16).reshape(-1, 2) for i in range(4)], axis=1)
    want = np.stack([as_float64(x.view(kind)).reshape(-1, 4) for x in (first, second)], axis=-1)
    there = ~np.isnan(want)
    assert np.array_equal(as_float64(got)[there], want[there]) and there.sum() == (512 if kind == INT8 else 508)


def test_scales_by_block_without_whole_blocks_and_with_many_rows() -> None:
    x, values, scale = arguments(2, kind=E4M3, blocks=3, inputs=320)
    want = as_float64(x) @ as_float64(reference.dequantize(values, scale, 128))
    assert_close(quantized_matmul(x, values, scale, block=128), want, 5e-3)
    x, values, scale = arguments(70, kind=E4M3, blocks=2)
    assert_close(quantized_matmul(x, values, scale, block=128), exact(x, values, scale), 5e-3)
    traced = lambda parts: str(jax.make_jaxpr(partial(quantized_matmul, block=128, parts=parts))(x[:2], values, scale))
    assert "bf16[2,128,64]" in traced(1)
    assert "bf16[2,128,64]" not in traced(4), "a device has a part of a block"


def test_a_quantised_matrix_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, values, scale = arguments(3, kind=INT8, blocks=1, outputs=256)
    asked = []

    def kernel(*args: jax.Array, block: int, parts: int) -> jax.Array:
        asked.append((args[0].shape, block, parts))
        return gpu.interpreted(*args, block=block)

    monkeypatch.setattr("pallas_kernels.quantized_matmul._gpu", kernel)
    with dispatch.using("reference"):
        want = matmul(x, Quantized(values, scale, 0))
    assert not asked
    assert_close(matmul(x, Quantized(values, scale, 0)), want, 3e-3)
    assert asked == [((3, 256), 0, 1)]
    with dispatch.spread():
        matmul(x, Quantized(values, scale, 0))
    assert len(asked) == 1 and "not for a mesh" in dispatch.fallbacks()["quantized_matmul"]


@pytest.mark.parametrize("shape", [(4096, 24576), (12288, 4096), (17408, 5120), (9216, 2560), (512, 2048)])
@pytest.mark.parametrize("step", [64, 128])
def test_the_inputs_are_shared_by_whole_steps(shape: tuple[int, int], step: int) -> None:
    for rows in (1, 16, 17, 32):
        tiles = gpu.tiles_for(rows, shape, step)
        assert shape[0] % (step * tiles.splits) == 0 and shape[1] % tiles.outputs == 0
        assert tiles.splits * shape[1] // tiles.outputs >= (32 if rows <= 16 else 1)


def test_what_the_kernel_cannot_do() -> None:
    x, values, scale = arguments(2, kind=INT8, blocks=1)
    with pytest.raises(NotImplementedError, match="for GPUs"):
        quantized_matmul(x, values, scale, block=0, implementation="gpu")
    with dispatch.using("gpu"):
        assert jnp.array_equal(quantized_matmul(x, values, scale, block=0), quantized_matmul(x, values, scale, block=0))
    assert "for GPUs" in dispatch.fallbacks()["quantized_matmul"]
    run = partial(gpu.interpreted, block=128)
    with pytest.raises(NotImplementedError, match="float32 by int8"):
        run(x.astype(jnp.float32), values, scale)
    with pytest.raises(NotImplementedError, match="33 rows; at least one and at most 32"):
        run(jnp.zeros((33, 256), jnp.bfloat16), values, scale)
    with pytest.raises(NotImplementedError, match="0 rows"):
        run(x[:0], values, scale)
    with pytest.raises(NotImplementedError, match="256 x 64 in blocks of 64: tiles do not divide it"):
        run(x, values, scale)
    with pytest.raises(NotImplementedError, match="256 x 64 in blocks of 96"):
        gpu.interpreted(x, values, jnp.ones((3, 64)), block=96, tiles=NARROW)
