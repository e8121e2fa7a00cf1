"""Pallas TPU kernel of verification: the logits of a window are read once, and only tokens are written.

A grid step holds up to 8 rows of one window, a row a sublane, with the whole vocabulary in vector memory (1 MB a row
for 248,320 tokens). Filters are thresholds on the scaled logits; each is found by 32 sweeps over vector memory, and
only in rows that ask for it. Noise is drawn in place, and only where a token can still win.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.verification import threefry
from pallas_kernels.verification.reference import accepted
from pallas_kernels.verification.sampling import Sampling

Carry = TypeVar("Carry")

ROWS = 8
LANES = 512  # of a row at a time, so that what a sweep carries stays in registers
TILES = 5  # unrolled in a sweep; 97 x 5 x 512 tokens are Qwen3.5's vocabulary
MAX_VOCAB = 1 << 18  # four buffers of 8 MB; also well within the integers that a float32 can hold
VMEM_BYTES = 48 << 20
NEVER = float("-inf")


def verify(
    logits: Array, drafts: Array, keys: Array, sampling: Sampling, *, interpret: Any = False
) -> tuple[Array, Array]:
    """As `reference.verify`. `interpret`: as of `pl.pallas_call`.

    Raises NotImplementedError for vocabularies beyond 262,144 and logits that are not float32.
    """
    [tokens] = _call(_verify_kernel, logits, keys, sampling, [jnp.int32], interpret)
    return tokens, accepted(tokens, drafts)


def summary(logits: Array, sampling: Sampling, *, interpret: Any = False) -> list[Array]:
    """The fields of `standard.Summary`. Raises as `verify` does."""
    keys = jnp.zeros((*logits.shape[:2], 2), jnp.uint32)
    return _call(_summary_kernel, logits, keys, sampling, [jnp.int32, jnp.float32, jnp.float32], interpret)


def _call(
    kernel: Callable[..., None], logits: Array, keys: Array, sampling: Sampling, results: list[Any], interpret: Any
) -> list[Array]:
    """Runs a kernel on the rows of every window; a result is a number a row, [B,W]."""
    batch, window, vocab = logits.shape
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits must be float32, not {logits.dtype}")
    if vocab > MAX_VOCAB:
        raise NotImplementedError(f"a vocabulary of {vocab} tokens; at most {MAX_VOCAB} fit the vector memory")
    rows = min(window, ROWS)
    padded = -(-vocab // (LANES * TILES)) * LANES * TILES
    block = lambda width: pl.BlockSpec((None, rows, width), lambda b, w, *_: (b, w, 0))
    positions = jnp.concatenate(
        [lax.bitcast_convert_type(keys, jnp.int32), sampling.no_stop[..., None].astype(jnp.int32)], axis=-1
    )
    min_p, top_k, top_p = sampling.filters
    numbers = jnp.stack([jnp.where(sampling.sampled, sampling.temperature, 0.0), jnp.log(min_p), top_p])
    switches = jnp.stack([sampling.no_stop.any(1).astype(jnp.int32), jnp.minimum(top_k, vocab)])
    found = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, pl.cdiv(window, rows)),
            in_specs=[block(vocab), block(3)],
            out_specs=[block(1)] * len(results),
            scratch_shapes=[pltpu.VMEM((rows, padded), jnp.float32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, window, 1), dtype) for dtype in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name=kernel.__name__.strip("_").removesuffix("_kernel"),
    )(numbers, switches, sampling.stop_ids.T, logits, positions)
    return [x[..., 0] for x in found]


def _verify_kernel(
    numbers: Any, switches: Any, stop_ids: Any, logits: Any, positions: Any, tokens: Any, x: Any, mass: Any
) -> None:
    threshold = _process(numbers, switches, stop_ids, logits, positions, x, mass)
    sampled = numbers[0, pl.program_id(0)] > 0
    tokens[...] = lax.cond(sampled, lambda: _argmax(x, threshold, positions[...]), lambda: _argmax(x, threshold, None))


def _summary_kernel(
    numbers: Any, switches: Any, stop_ids: Any, logits: Any, positions: Any, likeliest: Any, lowest: Any, total: Any,
    x: Any, raw: Any,
) -> None:  # fmt: skip
    threshold = _process(numbers, switches, stop_ids, logits, positions, x, raw)
    likeliest[...] = _argmax(x, threshold, None)
    _load(logits, jnp.float32(1), raw)
    size = (x.shape[0], LANES)
    keeps = lambda i: (x[:, i] >= threshold) & (x[:, i] > NEVER)
    least = lambda i, n: jnp.minimum(n, jnp.where(keeps(i), raw[:, i], -NEVER))
    lowest[...] = jnp.min(_sweep(x, least, jnp.full(size, -NEVER, jnp.float32)), axis=1, keepdims=True)
    most = lambda i, n: jnp.maximum(n, x[:, i])
    top = jnp.max(_sweep(x, most, jnp.full(size, NEVER, jnp.float32)), axis=1, keepdims=True)
    add = lambda i, n: n + jnp.where(keeps(i), jnp.exp(x[:, i] - top), 0.0)
    total[...] = top + jnp.log(jnp.sum(_sweep(x, add, jnp.zeros(size, jnp.float32)), axis=1, keepdims=True))


def _process(numbers: Any, switches: Any, stop_ids: Any, logits: Any, positions: Any, x: Any, mass: Any) -> Array:
    """Scaled and masked logits into `x`; returns the filters' threshold [W,1], -inf in greedy rows."""
    row = pl.program_id(0)
    temperature, log_min_p, top_p = (numbers[i, row] for i in range(3))
    masking, top_k = switches[0, row], switches[1, row]
    sampled = temperature > 0
    _load(logits, jnp.where(sampled, temperature, 1.0), x)

    @pl.when(masking > 0)
    def mask_stops() -> None:
        for i in range(stop_ids.shape[0]):
            _mask(x, stop_ids[i, row], positions[:, 2:] > 0)

    return lax.cond(
        sampled,
        lambda: _threshold(x, mass, log_min_p, top_k, top_p),
        lambda: jnp.full((x.shape[0], 1), NEVER, jnp.float32),
    )


def _load(logits: Any, temperature: Array, x: Any) -> None:
    """Scaled logits, and -inf beyond them, into `x`."""
    vocab, padded = logits.shape[1], x.shape[1]
    whole = vocab // LANES

    def copy(i: Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        x[:, at] = logits[:, at] / temperature

    lax.fori_loop(0, whole, copy, None)
    rest = whole * LANES
    if padded > rest:
        x[:, rest:] = jnp.full((x.shape[0], padded - rest), NEVER, jnp.float32)
    if vocab > rest:
        x[:, rest:vocab] = logits[:, rest:] / temperature


def _mask(x: Any, token: Array, rows: Array) -> None:
    """-inf for one token (-1: none) in `rows` [W,1]."""
    start = pl.multiple_of(jnp.clip(token & -128, 0, x.shape[1] - 128), 128)
    at = pl.ds(start, 128)
    lane = start + lax.broadcasted_iota(jnp.int32, (x.shape[0], 128), 1)
    x[:, at] = jnp.where((lane == token) & rows, NEVER, x[:, at])


def _threshold(x: Any, mass: Any, log_min_p: Array, top_k: Array, top_p: Array) -> Array:
    """[W,1] float32: tokens whose scaled logit is below are filtered out."""
    size = (x.shape[0], LANES)
    keep = lambda i, best: jnp.maximum(best, x[:, i])
    top = jnp.max(_sweep(x, keep, jnp.full(size, NEVER, jnp.float32)), axis=1, keepdims=True)
    floor = top + log_min_p

    def count(lowest: Array) -> Array:
        add = lambda i, n: n + jnp.where(x[:, i] >= lowest, 1.0, 0.0)
        return jnp.sum(_sweep(x, add, jnp.zeros(size, jnp.float32)), axis=1, keepdims=True)

    def weigh(lowest: Array) -> Array:
        add = lambda i, n: n + jnp.where(x[:, i] >= lowest, mass[:, i], 0.0)
        return jnp.sum(_sweep(x, add, jnp.zeros(size, jnp.float32)), axis=1, keepdims=True)

    def by_mass(floor: Array) -> Array:
        def exponential(i: Any, carry: Array) -> Array:
            mass[:, i] = jnp.exp(x[:, i] - top)
            return carry

        _sweep(x, exponential, jnp.float32(0))
        wanted = top_p * weigh(floor)
        return _bisect(floor, lambda lowest: weigh(lowest) >= wanted)

    wanted = top_k.astype(jnp.float32)
    floor = lax.cond(top_k > 0, lambda: _bisect(floor, lambda lowest: count(lowest) >= wanted), lambda: floor)
    return lax.cond(top_p > 0, lambda: by_mass(floor), lambda: floor)


def _bisect(floor: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest threshold [W,1] not below `floor` that keeps enough; `floor` if none does.

    Bit by bit in the order of floats, as the reference does it: int32 words whose unsigned order is that of the floats.
    """

    def decide_bit(step: Array, word: Array) -> Array:
        candidate = word | lax.shift_left(jnp.int32(1), 31 - step)
        return jnp.where(enough(jnp.maximum(_float_of(candidate), floor)), candidate, word)

    word = lax.fori_loop(0, 32, decide_bit, jnp.zeros(floor.shape, jnp.int32))
    return jnp.maximum(_float_of(word), floor)


def _float_of(word: Array) -> Array:
    """Words below that of -inf, which belong to no number, give -inf, and those above that of inf give inf."""
    lowest, highest = ~jnp.int32(-0x800000), jnp.int32(-0x800000)  # words of -inf (not negative) and inf (negative)
    value = lax.bitcast_convert_type(jnp.where(word < 0, word ^ jnp.int32(-(2**31)), ~word), jnp.float32)
    value = jnp.where((word >= 0) & (word < lowest), NEVER, value)
    return jnp.where((word < 0) & (word > highest), -NEVER, value)


def _argmax(x: Any, threshold: Array, positions: Array | None) -> Array:
    """[W,1] int32: the first token with the largest sum of scaled logit and noise, of those not filtered out."""
    size = (x.shape[0], LANES)
    lane = lax.broadcasted_iota(jnp.int32, size, 1)

    def better(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        best, where = carry
        index = i.start + lane
        value = jnp.where(x[:, i] >= threshold, x[:, i], NEVER)
        value = value if positions is None else value + _noise(positions, index)
        is_better = value > best
        return jnp.where(is_better, value, best), jnp.where(is_better, index.astype(jnp.float32), where)

    start = (jnp.full(size, NEVER, jnp.float32), jnp.zeros(size, jnp.float32))
    useful = None if positions is None else lambda i: jnp.max(jnp.where(x[:, i] >= threshold, 1.0, 0.0)) > 0
    best, where = _sweep(x, better, start, useful)
    top = jnp.max(best, axis=1, keepdims=True)
    return jnp.min(jnp.where(best == top, where, float(MAX_VOCAB)), axis=1, keepdims=True).astype(jnp.int32)


def _noise(positions: Array, index: Array) -> Array:
    first, second = (lax.bitcast_convert_type(positions[:, i : i + 1], jnp.uint32) for i in range(2))
    return threefry.gumbel(threefry.bits((first, second), lax.bitcast_convert_type(index, jnp.uint32)))


def _sweep(
    x: Any, step: Callable[[Any, Carry], Carry], carry: Carry, useful: Callable[[Any], Array] | None = None
) -> Carry:
    """`step(lanes, carry)` over all of a row, `LANES` at a time; groups of tiles that are not `useful` are left out."""
    group = LANES * TILES

    def tiles(start: Array, carry: Carry) -> Carry:
        for tile in range(TILES):
            carry = step(pl.ds(pl.multiple_of(start + tile * LANES, LANES), LANES), carry)
        return carry

    def unrolled(i: Array, carry: Carry) -> Carry:
        start = pl.multiple_of(i * group, group)
        if useful is None:
            return tiles(start, carry)
        return lax.cond(useful(pl.ds(start, group)), lambda c: tiles(start, c), lambda c: c, carry)

    return lax.fori_loop(0, x.shape[1] // group, unrolled, carry)
