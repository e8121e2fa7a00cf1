"""What the real Mosaic compiler says of the TPU kernels at the shapes of published models; needs no TPU.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8 \
        python -m benchmarks.tpu_kernels [KERNEL ...]

compiles the kernels named, or all of them, for every chip with libtpu and prints a table. HBM is a program's arguments
and results (what is written in place counts twice) and temporaries; VMEM what a call asks for when given less.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention import write_tpu
from pallas_kernels.gated_delta import Pending, chunked_tpu
from pallas_kernels.gated_delta import tpu as gated_delta
from pallas_kernels.verification import Sampling
from pallas_kernels.verification import tpu as verification_tpu

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}


class Shape(NamedTuple):
    """What a published config fixes. Widths of the delta rule are 128 in all of them."""

    key_heads: int  # of the delta rule
    value_heads: int
    heads: int  # of attention
    kv_heads: int
    width: int
    vocab: int


MODELS = {
    "Qwen3.5-4B": Shape(16, 32, 16, 4, 256, 248320),
    "Qwen3.5-9B": Shape(16, 32, 16, 4, 256, 248320),
    "Qwen3.5-27B": Shape(16, 48, 24, 4, 256, 248320),
    "Qwen3.5-35B-A3B": Shape(16, 32, 16, 2, 256, 248320),
}


class Case(NamedTuple):
    """A kernel with abstract arguments; `module.VMEM_BYTES` is its limit of vector memory."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]
    module: Any


def delta_step(shape: Shape, batch: int, window: int) -> Case:
    vectors = lambda heads: _abstract(batch, window, heads, 128)
    gates = _abstract(batch, window, shape.value_heads)
    pending = Pending(vectors(shape.key_heads), vectors(shape.value_heads), gates, _abstract(batch, dtype=jnp.int32))
    q = k = vectors(shape.key_heads)
    state = _abstract(batch, shape.value_heads, 128, 128)
    return Case(gated_delta.step, (state, pending, q, k, vectors(shape.value_heads), gates, gates), (0,), gated_delta)


def delta_chunked(shape: Shape, batch: int, tokens: int) -> Case:
    vectors = lambda heads: _abstract(batch, tokens, heads, 128)
    q, v, gates = vectors(shape.key_heads), vectors(shape.value_heads), _abstract(batch, tokens, shape.value_heads)
    state = _abstract(batch, shape.value_heads, 128, 128)
    return Case(chunked_tpu.chunked, (q, q, v, gates, gates, state), (5,), chunked_tpu)


def verification(shape: Shape, batch: int, window: int) -> Case:
    number, integer = _abstract(batch), _abstract(batch, dtype=jnp.int32)
    stop_ids, no_stop = _abstract(batch, 16, dtype=jnp.int32), _abstract(batch, window, dtype=jnp.bool_)
    sampling = Sampling(number, number, integer, number, stop_ids, no_stop)
    drafts, keys = _abstract(batch, window - 1, dtype=jnp.int32), _abstract(batch, window, 2, dtype=jnp.uint32)
    logits = _abstract(batch, window, shape.vocab)
    return Case(verification_tpu.verify, (logits, drafts, keys, sampling), (), verification_tpu)


def verification_summary(shape: Shape, batch: int, window: int) -> Case:
    logits, _, _, sampling = verification(shape, batch, window).args
    return Case(verification_tpu.summary, (logits, sampling), (), verification_tpu)


def paged_attention(shape: Shape, batch: int, tokens: int, length: int = 8192, page_size: int = 64) -> Case:
    """`batch` sequences with room for `length` tokens, in bfloat16 as they are served."""
    pages = length // page_size
    pool = _abstract(shape.kv_heads, batch * pages, page_size, shape.width, dtype=jnp.bfloat16)
    q = _abstract(batch, tokens, shape.heads, shape.width, dtype=jnp.bfloat16)
    table, positions = (_abstract(batch, n, dtype=jnp.int32) for n in (pages, tokens))
    return Case(attention.paged_attention, (q, pool, pool, table, positions), (), attention)


def write_pages(shape: Shape, batch: int, tokens: int, length: int = 8192, page_size: int = 64) -> Case:
    pool, table = (paged_attention(shape, batch, tokens, length, page_size).args[i] for i in (1, 3))
    values = _abstract(batch, tokens, shape.kv_heads, shape.width, dtype=jnp.bfloat16)
    positions, valid = (_abstract(batch, tokens, dtype=dtype) for dtype in (jnp.int32, jnp.bool_))
    return Case(write_tpu.write_pages, (pool, values, table, positions, valid), (0,), write_tpu)


KERNELS: dict[str, tuple[Callable[[Shape, int, int], Case], tuple[int, ...]]] = {
    "gated_delta.step": (delta_step, (1, 4, 16)),
    "gated_delta.chunked": (delta_chunked, (512,)),
    "verification.verify": (verification, (1, 4, 8, 16)),
    "verification.summary": (verification_summary, (4,)),
    "attention.paged_attention": (paged_attention, (1, 4, 16, 512)),
    "attention.write_pages": (write_pages, (4, 512)),
}
"""What builds a case, and the tokens of a window or a chunk of prompt to build it for."""


def compile_for(case: Case, chip: str) -> Any:
    """The compiled program. Raises what the compiler raises: too little vector memory, a layout it cannot do."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    return jax.jit(case.kernel, donate_argnums=case.donated).lower(*jax.tree.map(place, case.args)).compile()


def hbm_bytes(compiled: Any) -> int:
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes


def vmem_megabytes(case: Case, chip: str) -> float:
    """What it compiles with after asking for it: given too little, the compiler says how much it was allocating."""
    limit = 1 << 16
    while True:
        with mock.patch.object(case.module, "VMEM_BYTES", limit):
            fresh = case._replace(kernel=lambda *args: case.kernel(*args))  # not what jit has traced before
            try:
                compile_for(fresh, chip)
                return limit / 2**20
            except jax.errors.JaxRuntimeError as error:
                limit = max(_wanted(str(error)), limit + 2**16)


def _wanted(error: str) -> int:
    found = re.search(r"Scoped allocation with size ([\d.]+)([KM])", error)
    assert found, error
    return int(float(found[1]) * (2**10 if found[2] == "K" else 2**20)) + 2**14  # it is rounded to two digits


def rows(kernels: Sequence[str], batch: int = 8) -> Iterator[str]:
    for kernel in kernels:
        build, sizes = KERNELS[kernel]
        for tokens in sizes:
            models: dict[Any, list[str]] = {}
            for name, shape in MODELS.items():
                models.setdefault(str(build(shape, batch, tokens).args), []).append(name)
            for same in models.values():
                yield _row(kernel, build(MODELS[same[0]], batch, tokens), same, tokens)


def _row(kernel: str, case: Case, models: list[str], tokens: int) -> str:
    names = "all" if len(models) == len(MODELS) else ", ".join(name.removeprefix("Qwen3.5-") for name in models)
    vmem = " / ".join(f"{vmem_megabytes(case, chip):.1f}" for chip in CHIPS)
    hbm = " / ".join(f"{hbm_bytes(compile_for(case, chip)) / 2**20:.1f}" for chip in CHIPS)
    return f"| {kernel} | {names} | {tokens} | {vmem} | {hbm} |"


def _abstract(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


if __name__ == "__main__":
    chips = " / ".join(CHIPS)
    print(f"| kernel | Qwen3.5 | tokens | VMEM, MiB, {chips} | HBM, MiB, {chips} |\n| --- | --- | --- | --- | --- |")
    for line in rows(sys.argv[1:] or list(KERNELS)):
        print(line, flush=True)
