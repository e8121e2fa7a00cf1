"""The engine: slots on the device, requests on the host, one compiled cycle between them.

Requests wait until slots are free; a finished slot is refilled while the others go on. The host is asked only every
`cycles_per_sync` cycles, to stream what is new and to admit what waits.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from eagle3_jax.cache import draft_cache, target_cache
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.precision import join, matmul_precision, split
from eagle3_jax.sharding import cache_shardings, laid_out, replicated
from eagle3_jax.target import Target
from infer.cycle import MAX_DRAFTS, DecodeState, Speculation, prefill, run_cycles
from infer.sampling import SamplingState, features, idle_state
from pallas_kernels import dispatch
from pallas_kernels.verification import Asks, Feature

Weights = tuple[list[Array], ...]
"""Leaves of the target and, if there is one, of the drafter."""

REASONS = {0: None, 1: "stop", 2: "length"}
_CHUNKS = (16, 64, 256, 1024)
_FEWEST_ROWS = 16  # of a prefill pass: fewer would not be faster


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine. `prefill_chunk` bounds the prompt tokens of one pass; shorter buckets are used as well.

    kernels: implementation that operations prefer, see `pallas_kernels.dispatch`; None leaves it to them.
    """

    max_num_seqs: int = 16
    max_model_len: int = 2048
    speculation: Speculation = Speculation()
    cycles_per_sync: int = 8
    prefill_chunk: int = 256
    page_size: int = 64
    dtype: Any = jnp.float32
    kernels: str | None = None


@dataclasses.dataclass(frozen=True)
class SlotUpdate:
    """What a request gained since the last step. `codes`: see `cycle.DecodeState`."""

    request_id: Any
    token_ids: list[int]
    codes: list[int]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class _Request:
    request_id: Any
    token_ids: np.ndarray
    sampling: SamplingState
    limit: int


@dataclasses.dataclass
class _Slot:
    request_id: Any
    reported: int  # tokens of the sequence that the caller has seen


class Engine:
    """Generates for a target and, if given, its EAGLE-3 head.

    Raises:
      ConfigError: the drafter does not fit the target, or sizes make no sense.
    """

    def __init__(
        self, target: Target, drafter: Eagle3 | None, config: EngineConfig, *, mesh: Mesh | None = None
    ) -> None:
        _check(target, drafter, config)
        self.config, self.mesh = config, mesh
        self._target_config = target.config
        self._draft_config = drafter.config if drafter is not None else None
        parts = [split(model) for model in (target, drafter) if model is not None]
        self._leaves = tuple(leaves for _, leaves, _ in parts)
        how, dtype = config.speculation, config.dtype

        def models(weights: Weights) -> tuple[Target, Eagle3 | None]:
            built = [join(graph, tree, leaves) for (graph, _, tree), leaves in zip(parts, weights, strict=True)]
            return built[0], (built[1] if len(built) > 1 else None)

        def prefill_step(weights: Weights, state: DecodeState, chunk: int, slots: Array | None) -> DecodeState:
            with matmul_precision(dtype), laid_out(mesh, "slots"), dispatch.using(config.kernels):
                return prefill(*models(weights), state, chunk, slots)

        def decode_step(
            weights: Weights, state: DecodeState, limit: Array, enough_idle: Array, asks: Asks
        ) -> DecodeState:
            with matmul_precision(dtype), laid_out(mesh, "slots"), dispatch.using(config.kernels):
                return run_cycles(*models(weights), state, how, limit, enough_idle, asks)

        empty = partial(empty_state, self._target_config, self._draft_config, config)
        layout: dict[str, Any] = {} if mesh is None else {"out_shardings": state_shardings(jax.eval_shape(empty), mesh)}
        self._state: DecodeState = jax.jit(empty, **layout)()
        self._prefill = jax.jit(prefill_step, donate_argnums=1, static_argnums=2, **layout)
        self._decode = jax.jit(decode_step, donate_argnums=1, static_argnums=4, **layout)
        self._admit = jax.jit(_admit, donate_argnums=0, **layout)
        self._silence = jax.jit(_silence, donate_argnums=0, **layout)
        self._waiting: collections.deque[_Request] = collections.deque()
        # What the requests at work ask of the sampler, or those asked that were there with them: each combination is a
        # program of its own, so it does not shrink with every request that ends.
        self._asks: frozenset[Feature] = frozenset()
        self._slots: list[_Slot | None] = [None] * config.max_num_seqs

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting) or any(slot is not None for slot in self._slots)

    def replace_drafter(self, drafter: Eagle3) -> None:
        """Other weights for the head; sequences that run go on with them, and nothing is compiled again.

        Raises:
          ConfigError: a head of another config, or an engine without one.
        """
        if drafter.config != self._draft_config:
            raise ConfigError(f"a head of {drafter.config} cannot take the place of one of {self._draft_config}")
        self._leaves = (self._leaves[0], split(drafter)[1])

    def submit(
        self, request_id: Any, token_ids: Sequence[int], sampling: SamplingState, max_tokens: int | None
    ) -> None:
        """Queues a prompt. `sampling` is one row, from `sampling.request_state`.

        Raises:
          UserError: an empty prompt, one that leaves no room for a token, or ids outside the vocabulary.
        """
        ids, room = np.asarray(token_ids, np.int32), self.config.max_model_len
        if ids.ndim != 1 or not len(ids):
            raise UserError(f"request {request_id}: the prompt is empty")
        if len(ids) >= room:
            raise UserError(
                f"request {request_id}: a prompt of {len(ids)} tokens leaves no room in max_model_len={room}"
            )
        if ids.min() < 0 or ids.max() >= self._target_config.vocab_size:
            raise UserError(
                f"request {request_id}: token ids {ids.min()}..{ids.max()} are not all inside the vocabulary "
                f"of {self._target_config.vocab_size}"
            )
        limit = room if max_tokens is None else min(len(ids) + max_tokens, room)
        self._asks = features(sampling, len(ids)) | (self._asks if self.has_work else frozenset())
        self._waiting.append(_Request(request_id, ids, sampling, limit))

    def abort(self, request_id: Any) -> None:
        """Forgets a request, waiting or running; others are not touched."""
        self._waiting = collections.deque(r for r in self._waiting if r.request_id != request_id)
        mask = np.array([slot is not None and slot.request_id == request_id for slot in self._slots])
        if mask.any():
            self._slots = [None if gone else slot for slot, gone in zip(self._slots, mask, strict=True)]
            self._state = self._silence(self._state, mask)

    def step(self) -> list[SlotUpdate]:
        """Admits what fits, runs up to `cycles_per_sync` cycles, and reports every slot's new tokens."""
        if self._admit_waiting():
            return self._collect()
        limit = np.int32(self.config.cycles_per_sync)
        # Every return to the host costs as much as some cycles: so not for each slot that ends, while others wait.
        enough = self._enough_free() if self._waiting else len(self._slots) + 1
        self._state = self._decode(self._leaves, self._state, limit, np.int32(enough), self._asks)
        return self._collect()

    def _admit_waiting(self) -> bool:
        """Fills free slots, once enough are."""
        free = [i for i, slot in enumerate(self._slots) if slot is None]
        if not self._waiting or len(free) < self._enough_free():
            return False
        batch = {i: self._waiting.popleft() for i in free[: len(self._waiting)]}
        for i, request in batch.items():
            self._slots[i] = _Slot(request.request_id, len(request.token_ids))
        self._state = self._admit(self._state, *_rows(batch, self.config, self._state.tokens.shape))
        for slots, longest in self._prefill_groups(batch):
            for chunk in self.prefill_chunks(longest):
                self._state = self._prefill(self._leaves, self._state, chunk, slots)
        return True

    def _enough_free(self) -> int:
        """How many slots are filled at once: a quarter, so that prefill passes are shared, or all that wait."""
        return min(-(-len(self._slots) // 4), len(self._waiting))

    def _prefill_groups(self, batch: dict[int, _Request]) -> list[tuple[np.ndarray | None, int]]:
        """Slots to take in together, prompts of like length, and the longest of these; None for all the slots.

        A pass costs what its rows cost, with or without a prompt, and each number of rows is a program of its own: so
        there is one number, a quarter of the slots, since admission waits for as many.
        """
        lengths = {i: len(request.token_ids) for i, request in batch.items()}
        rows = max(_FEWEST_ROWS, -(-len(self._slots) // 4))
        if self.mesh is not None or rows >= len(self._slots):
            return [(None, max(lengths.values()))]
        ordered = sorted(lengths, key=lambda i: lengths[i])
        groups = [ordered[i : i + rows] for i in range(0, len(ordered), rows)]
        nobody = len(self._slots)
        return [(np.array(group + [nobody] * (rows - len(group)), np.int32), lengths[group[-1]]) for group in groups]

    def prefill_chunks(self, tokens: int) -> list[int]:
        """Lengths of the passes that take in prompts of up to `tokens`: a program is compiled for each length."""
        chunks: list[int] = []
        while (left := tokens - sum(chunks)) > 0:
            chunks.append(_bucket(left, self.config.prefill_chunk))
        return chunks

    def _collect(self) -> list[SlotUpdate]:
        s = self._state
        lengths, active, reasons, tokens, codes = jax.device_get((s.lengths, s.active, s.reasons, s.tokens, s.codes))
        updates = []
        for i, slot in enumerate(self._slots):
            if slot is None:
                continue
            new = slice(slot.reported, int(lengths[i]))
            slot.reported = int(lengths[i])
            reason = None if active[i] else REASONS[int(reasons[i])]
            updates.append(SlotUpdate(slot.request_id, tokens[i, new].tolist(), codes[i, new].tolist(), reason))
            if reason is not None:
                self._slots[i] = None
        return updates


def _check(target: Target, drafter: Eagle3 | None, config: EngineConfig) -> None:
    k = config.speculation.num_drafts
    if (drafter is None) != (k == 0):
        raise ConfigError(f"num_speculative_tokens={k} {'without' if drafter is None else 'with'} a drafter")
    if not 0 <= k <= MAX_DRAFTS:
        raise ConfigError(f"num_speculative_tokens={k}; at most {MAX_DRAFTS} fit")
    if config.max_num_seqs < 1 or config.max_model_len < 2:
        raise ConfigError(f"max_num_seqs={config.max_num_seqs}, max_model_len={config.max_model_len}: too small")
    if drafter is None:
        return
    t, d = target.config, drafter.config
    if (d.target_hidden_size, d.vocab_size) != (t.hidden_size, t.vocab_size):
        raise ConfigError(
            f"the head was made for a target of width {d.target_hidden_size} and vocabulary {d.vocab_size}; "
            f"this target has {t.hidden_size} and {t.vocab_size}"
        )
    if not d.own_embedding and d.hidden_size != t.hidden_size:
        raise ConfigError(
            f"a head of width {d.hidden_size} cannot use the embeddings of a target of width {t.hidden_size}"
        )
    if max(d.aux_layers) > t.num_layers:
        raise ConfigError(f"the head reads boundaries {d.aux_layers}; this target has {t.num_layers} layers")


def empty_state(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig) -> DecodeState:
    """A batch of idle slots."""
    slots, window = config.max_num_seqs, config.speculation.window
    length = config.max_model_len + window
    ints = jnp.zeros((slots,), jnp.int32)
    where = {"dtype": config.dtype, "page_size": config.page_size}
    return DecodeState(
        tokens=jnp.zeros((slots, length), jnp.int32),
        codes=jnp.zeros((slots, length), jnp.int8),
        prompt_lengths=ints,
        lengths=ints + 1,
        limits=ints,
        active=jnp.zeros((slots,), bool),
        reasons=ints,
        target=target_cache(target, slots, length, window, **where),
        drafter=None if draft is None else draft_cache(draft, slots, length, **where),
        features=None if draft is None else jnp.zeros((slots, window, draft.hidden_size), config.dtype),
        num_features=ints,
        sampling=idle_state(slots),
    )


def _admit(
    state: DecodeState, slots: Array, tokens: Array, prompt_lengths: Array, limits: Array, sampling: SamplingState
) -> DecodeState:
    """New requests in the slots where `slots` [B] is True."""

    def put(old: Array, new: Array) -> Array:
        return jnp.where(slots.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

    return dataclasses.replace(
        state,
        tokens=put(state.tokens, tokens),
        prompt_lengths=put(state.prompt_lengths, prompt_lengths),
        lengths=put(state.lengths, prompt_lengths),
        limits=put(state.limits, limits),
        reasons=put(state.reasons, jnp.zeros_like(state.reasons)),
        active=state.active & ~slots,
        target=state.target.reset(slots),
        drafter=None if state.drafter is None else state.drafter.reset(slots),
        num_features=put(state.num_features, jnp.zeros_like(state.num_features)),
        sampling=jax.tree.map(put, state.sampling, sampling),
    )


def _silence(state: DecodeState, slots: Array) -> DecodeState:
    return dataclasses.replace(state, active=state.active & ~slots)


def _rows(batch: dict[int, _Request], config: EngineConfig, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Host arrays of a whole batch in which the rows of `batch` are filled."""
    slots, tokens = np.zeros(shape[0], bool), np.zeros(shape, np.int32)
    lengths, limits = np.zeros(shape[0], np.int32), np.zeros(shape[0], np.int32)
    sampling = jax.tree.map(np.array, idle_state(shape[0]))
    for i, request in batch.items():
        slots[i], lengths[i], limits[i] = True, len(request.token_ids), request.limit
        tokens[i, : len(request.token_ids)] = request.token_ids
        for whole, row in zip(jax.tree.leaves(sampling), jax.tree.leaves(request.sampling), strict=True):
            whole[i] = np.asarray(row)[0]
    return slots, tokens, lengths, limits, sampling


def _bucket(tokens: int, largest: int) -> int:
    sizes = sorted({size for size in _CHUNKS if size < largest} | {largest})
    return next((size for size in sizes if size >= tokens), largest)


def state_shardings(state: DecodeState, mesh: Mesh) -> DecodeState:
    """Where a batch's state lies: caches as the table says, the rest, small and read by every host, everywhere."""
    whole = jax.tree.map(lambda _: replicated(mesh), state)
    drafter = None if state.drafter is None else cache_shardings(state.drafter, mesh)
    return dataclasses.replace(whole, target=cache_shardings(state.target, mesh), drafter=drafter)
