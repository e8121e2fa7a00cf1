"""From logits to tokens: the same function of (logits, parameters, position) for every row of every window.

Logits are processed in vLLM's order: stop ids masked before min_tokens, temperature, min_p, top_k, top_p. A token is
the argmax of processed logits plus Gumbel noise that belongs to its absolute position (the Gumbel-max trick), so a
text does not depend on how its positions were grouped into windows, batches or shards.

Filters never sort the vocabulary. Each is a threshold on the logits, found digit by digit in the float's bits, and is
skipped when no row of the batch asks for it; an all-greedy batch skips everything here but the argmax.

Letters: B batch, W window, V vocabulary, U draft vocabulary. "Position" always means the index, in the whole
sequence, of the token that a row of logits predicts (the first token after a prompt of n tokens has position n).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.errors import UserError
from infer.params import SamplingParams
from pallas_kernels import verification

DraftSampleMethod = Literal["coupled", "greedy", "probabilistic"]

MAX_STOP_IDS = 16
PRNG = "threefry2x32"  # named, so that jax_default_prng_impl cannot change anybody's text


class Purpose(IntEnum):
    """What the randomness of a position is used for; every use has its own key."""

    TOKEN = 0  # the noise that chooses the token
    DRAFT = 1  # the drafter's own draw, where drafts must be independent of the target's noise
    ACCEPT = 2  # the uniform number of a rejection test
    RESIDUAL = 3  # the noise that chooses the token after a rejection


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters of the B rows of a batch.

    temperature [B] float32, 0 = greedy; top_p [B] float32, 1 = off; top_k [B] int32, 0 or less = off;
    min_p [B] float32, 0 = off; min_length [B] int32, the first position at which a stop id may be sampled;
    stop_ids [B, n] int32 padded with -1; key [B, 2] uint32, the data of each request's threefry key. `asks`: see
    `verification.Sampling`; it is set inside a compiled program alone.
    """

    temperature: Array
    top_p: Array
    top_k: Array
    min_p: Array
    min_length: Array
    stop_ids: Array
    key: Array
    asks: verification.Asks = field(default=None, metadata={"static": True})

    @property
    def sampled(self) -> Array:
        """[B] bool: rows that draw, rather than take the most likely token."""
        return self.temperature > 0

    def at(self, positions: Array) -> verification.Sampling:
        """The same for the tokens at `positions` [B, W]."""
        no_stop = positions < self.min_length[:, None]
        rows = self.temperature, self.min_p, self.top_k, self.top_p, self.stop_ids
        return verification.Sampling(*rows, no_stop, self.asks)


def idle_state(batch: int) -> SamplingState:
    """Rows that nobody uses: greedy and without filters, so that they cost nothing."""
    return SamplingState(
        temperature=jnp.zeros(batch, jnp.float32),
        top_p=jnp.ones(batch, jnp.float32),
        top_k=jnp.zeros(batch, jnp.int32),
        min_p=jnp.zeros(batch, jnp.float32),
        min_length=jnp.zeros(batch, jnp.int32),
        stop_ids=jnp.full((batch, MAX_STOP_IDS), -1, jnp.int32),
        key=jnp.zeros((batch, 2), jnp.uint32),
    )


def request_state(
    params: SamplingParams, *, prompt_length: int, model_stop_ids: Sequence[int], key: np.ndarray
) -> SamplingState:
    """One request's parameters as a state of one row (numpy arrays, to be written into a slot of a batch).

    `model_stop_ids` are the model's own, which `ignore_eos` switches off; `key` comes from `request_key`.
    Raises UserError when the request has more stop ids than a slot can hold.
    """
    stop_ids = np.full((1, MAX_STOP_IDS), -1, np.int32)
    ids = resolve_stop_ids(params, model_stop_ids)
    stop_ids[0, : len(ids)] = ids
    row: dict[str, Any] = {
        "temperature": np.array([0.0 if params.greedy else params.temperature], np.float32),
        "top_p": np.array([params.top_p], np.float32),
        "top_k": np.array([max(params.top_k, 0)], np.int32),
        "min_p": np.array([params.min_p], np.float32),
        "min_length": np.array([prompt_length + params.min_tokens], np.int32),
        "stop_ids": stop_ids,
        "key": np.asarray(key, np.uint32)[None],
    }
    return SamplingState(**row)


def features(row: SamplingState, prompt_length: int) -> frozenset[verification.Feature]:
    """What one request, a row of numpy arrays from `request_state`, asks of the sampler."""
    drawn = bool(row.temperature[0] > 0)
    asked: dict[verification.Feature, bool] = {
        "temperature": drawn,
        "min_p": drawn and bool(row.min_p[0] > 0),
        "top_k": drawn and bool(row.top_k[0] > 0),
        "top_p": drawn and bool(row.top_p[0] < 1),
        "min_tokens": bool(row.min_length[0] > prompt_length),
    }
    return frozenset(name for name, asks in asked.items() if asks)


def resolve_stop_ids(params: SamplingParams, model_stop_ids: Sequence[int]) -> list[int]:
    """The ids that end this request, sorted. Raises UserError when there are more than `MAX_STOP_IDS`."""
    own = set() if params.ignore_eos else set(model_stop_ids)
    ids = sorted(own | set(params.stop_token_ids or ()))
    if len(ids) > MAX_STOP_IDS:
        raise UserError(f"stop_token_ids: {len(ids)} with the model's own stop ids; at most {MAX_STOP_IDS} fit")
    return ids


def request_key(*, engine_seed: int, request_index: int, seed: int | None = None, sample_index: int = 0) -> np.ndarray:
    """[2] uint32: the key of one continuation of one request.

    With its own `seed` a request depends on nothing else, so it gives the same text alone and in a batch. Without,
    it depends on the engine's seed and on how many requests came before it. `sample_index` counts the n
    continuations. Seeds are integers in [0, 2**64).
    """
    root = engine_seed if seed is None else seed
    path = [root >> 32, 0 if seed is not None else 1, request_index if seed is None else 0, sample_index]
    key = jax.random.key(jnp.uint32(root & 0xFFFFFFFF), impl=PRNG)
    for number in path:
        key = jax.random.fold_in(key, jnp.uint32(number))
    return np.asarray(jax.random.key_data(key))


# ---------------------------------------------------------------------------------------------- randomness


def position_keys(params: SamplingState, positions: Array, purpose: Purpose) -> Array:
    """[B, W, 2] uint32: a key for each absolute position [B, W] of each request, and for one use."""
    return verification.position_keys(params.key, positions, int(purpose))


def uniform_open(params: SamplingState, positions: Array, purpose: Purpose = Purpose.ACCEPT) -> Array:
    """[B, W] float32 in the open interval (0, 1), one number a position: 2**-24 at least, 1 - 2**-24 at most."""
    keys = jax.random.wrap_key_data(position_keys(params, positions, purpose), impl=PRNG)
    bits = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32)))(keys)
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


# ------------------------------------------------------------------------------------------------- logits


def process_logits(logits: Array, params: SamplingState, positions: Array, token_ids: Array | None = None) -> Array:
    """Logits [B, W, V] float32 as the sampler sees them; tokens that may not be sampled become -inf.

    positions [B, W]: see the top of this file. token_ids [V]: the token that each column stands for, when the
    columns are not the vocabulary itself (a draft vocabulary).
    Greedy rows keep their logits, apart from masked stop ids.
    """
    return verification.process(logits, params.at(positions), token_ids)


# ------------------------------------------------------------------------------------------------- tokens


def sample(logits: Array, params: SamplingState, positions: Array) -> Array:
    """[B, W] int32 tokens: the argmax of processed logits [B, W, V] plus the noise of their positions [B, W]."""
    sampling, keys = params.at(positions), position_keys(params, positions, Purpose.TOKEN)
    return verification.draw(*verification.thresholded(logits, sampling), keys, sampling)


def draft_sample(
    draft_logits: Array,
    d2t: Array,
    params: SamplingState,
    positions: Array,
    *,
    method: DraftSampleMethod,
) -> tuple[Array, Array]:
    """The drafter's guess of the token at each position, and the distribution that it was drawn from.

    draft_logits [B, U], d2t [U] int32 (the target's id of each draft token), positions [B].
    "coupled": the drafter's own distribution with the target's noise of that position, so that both choose the same
    token wherever their distributions agree. "greedy": the drafter's argmax. "probabilistic": a draw with a key of
    its own, for rejection sampling. Noise is drawn for the draft vocabulary alone.
    Returns (target ids [B] int32, q [B, U] float32 probabilities: one-hot for an argmax).
    """
    rows, logits = positions[:, None], draft_logits[:, None, :]
    sampling = params.at(rows)
    if method == "greedy":
        processed = verification.mask_stops(logits, sampling, d2t)[:, 0]
        chosen = verification.likeliest(processed)
        return d2t[chosen], jax.nn.one_hot(chosen, processed.shape[-1], dtype=jnp.float32)
    scaled, least = verification.thresholded(logits, sampling, d2t)
    processed = verification.kept(scaled, least)[:, 0]
    keys = position_keys(params, rows, Purpose.TOKEN if method == "coupled" else Purpose.DRAFT)
    chosen = verification.draw(scaled, least, keys, sampling, d2t)[:, 0]
    one_hot = jax.nn.one_hot(chosen, processed.shape[-1], dtype=jnp.float32)
    q = jnp.where(params.sampled[:, None], jax.nn.softmax(processed, axis=-1), one_hot)
    return d2t[chosen], q
