"""Plain jnp forms of the gated delta rule; `recurrent` is the oracle of the others.

Letters: B batch, T tokens, C chunk or window, K key heads, R value heads of one key head, M key width, P value width.
Shapes: q, k [B,T,K,M]; v [B,T,K*R,P]; g (log decay, <= 0) and beta [B,T,K*R]; state [B,K*R,M,P]. Queries and keys come
L2-normed, queries scaled. Everything is computed in float32 at precision HIGHEST. A token with g = 0 and beta = 0 is
inert: that is what padding is.

Packed rows: segment_ids [B,T] int32 say which sequence each token is of, equal ids being neighbours. A token whose id
is not the one before it starts from a zero state; `state` is what the first token's segment starts from, and the state
returned is the last token's. Across a border terms are masked: a large negative decay would do the same, but would
drown the small ones that are summed with it.

    S_t = e^{g_t} S_{t-1} + k_t u_t^T,  u_t = beta_t (v_t - e^{g_t} S_{t-1}^T k_t),  o_t = S_t^T q_t

With G_t the running sum of g inside a chunk that starts from S0, the u of a chunk solve a unit triangular system:

    u_t + beta_t sum_{j<t} e^{G_t-G_j} (k_j.k_t) u_j = beta_t (v_t - e^{G_t} S0^T k_t)
    o_t = e^{G_t} S0^T q_t + sum_{j<=t} e^{G_t-G_j} (k_j.q_t) u_j
    S_a = e^{G_a} S0 + sum_{j<=a} e^{G_a-G_j} k_j u_j^T

In a tree of drafts each token has a parent before it, and j < t becomes "j is an ancestor of t", G_t the sum of g over
t and its ancestors. The same system, with zeros between branches. No kernel does trees, and the engine drafts chains.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def recurrent(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, segment_ids: Array | None = None
) -> tuple[Array, Array]:
    """Token by token. Returns outputs [B,T,K*R,P] and the final state, float32."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    ids = jnp.zeros(k.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    starts = jnp.pad(ids[:, 1:] != ids[:, :-1], [(0, 0), (1, 0)])

    def step(s: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q_t, k_t, v_t, g_t, beta_t, start_t = token
        s = jnp.where(start_t[:, None, None, None], 0.0, s * jnp.exp(g_t)[..., None, None])
        u_t = beta_t[..., None] * (v_t - _einsum("BKMP,BKM->BKP", s, k_t))
        s = s + k_t[..., :, None] * u_t[..., None, :]
        return s, _einsum("BKMP,BKM->BKP", s, q_t)

    tokens = tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, g, beta))
    state, out = jax.lax.scan(step, state.astype(jnp.float32), (*tokens, starts.T))
    return jnp.moveaxis(out, 0, 1), state


def chunked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, segment_ids: Array | None = None,
    chunk: int = 64,
) -> tuple[Array, Array]:  # fmt: skip
    """The same outputs and final state as `recurrent`, a chunk of tokens at a time; differentiable."""
    batch, tokens, key_heads, _ = k.shape
    size = min(chunk, _next_power_of_two(tokens))
    chunks = -(-tokens // size)
    split = (_pad(x, chunks * size).reshape(batch, chunks, size, *x.shape[2:]) for x in (q, k, v, g, beta))
    borders = None if segment_ids is None else _borders(segment_ids, chunks, size)
    parts = jax.vmap(_prepare, in_axes=1)(borders, *split)
    grouped = _group_state(state, key_heads)

    def step(s: Array, part: _Chunk) -> tuple[Array, Array]:
        updates, out = _apply(part, s)
        added = _einsum("BCKM,BCKR,BCKRP->BKRMP", part.k, part.to_end, updates)
        return s * part.from_start[:, -1][..., None, None] + added, out

    grouped, out = jax.lax.scan(step, grouped, parts)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, chunks * size, *v.shape[2:])
    return out[:, :tokens], grouped.reshape(state.shape)


def window(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, parents: Array | None = None
) -> tuple[Array, Array]:
    """Verifies a window from the committed state, which it only reads.

    parents [B,C] or [C] int32, of a tree: each token's parent, which comes before it, or -1 for the committed state.

    Returns outputs [B,C,K*R,P] and the updates u [B,C,K*R,P]: with keys and decays, all that `fold` needs to commit
    any prefix of the window, or any path of the tree from its root.
    """
    tokens = k.shape[1]
    size = _next_power_of_two(tokens)
    above = None if parents is None else ancestors(_pad_tree(parents, k.shape[0], size))
    part = _prepare(None, *(_pad(x, size) for x in (q, k, v, g, beta)), above=above)
    updates, out = _apply(part, _group_state(state, k.shape[2]))
    flat = [x.reshape(*x.shape[:2], v.shape[2], -1)[:, :tokens] for x in (out, updates)]
    return flat[0], flat[1]


def fold(state: Array, k: Array, updates: Array, g: Array, count: Array) -> Array:
    """Commits the first `count` [B] tokens of a window: S = e^{G_a} S0 + sum_{j<=a} e^{G_a-G_j} k_j u_j^T, a = count-1.

    count [B,C] bool, of a tree: the tokens of one path from its root, as `path` gives them; each adds to the state what
    is left of it at the path's end. Nothing accepted leaves the state as it is. One read and one write of the state,
    whatever the window.
    """
    tokens, key_heads = k.shape[1], k.shape[2]
    kept = count[..., None] if count.ndim == 2 else jnp.arange(tokens)[None, :, None] < count[:, None, None]
    g = jnp.where(kept, g.astype(jnp.float32), 0.0)
    from_here = jnp.cumsum(g[:, ::-1], axis=1)[:, ::-1]
    to_end = jnp.concatenate([from_here[:, 1:], jnp.zeros_like(g[:, :1])], axis=1)
    decay = jnp.where(kept, jnp.exp(to_end), 0.0)
    grouped = (*k.shape[:3], -1)
    added = _einsum(
        "BCKM,BCKR,BCKRP->BKRMP",
        k.astype(jnp.float32),
        decay.reshape(grouped),
        updates.reshape(*grouped, updates.shape[-1]),
    )
    total = from_here[:, 0].reshape(k.shape[0], key_heads, -1)
    scaled = _group_state(state, key_heads) * jnp.exp(total)[..., None, None]
    return (scaled + added).reshape(state.shape)


def ancestors(parents: Array) -> Array:
    """[B,C,C] bool of parents [B,C] int32: whether token j is above token i, at [b, i, j]."""
    above = parents[..., None] == jnp.arange(parents.shape[1], dtype=jnp.int32)[None, None]
    for _ in range(max(parents.shape[1] - 2, 0).bit_length()):  # paths of at most 2, 4, 8 ... steps
        above = above | (jnp.matmul(above.astype(jnp.float32), above.astype(jnp.float32)) > 0)
    return above


def path(parents: Array, last: Array) -> Array:
    """[B,C] bool: token `last` [B] int32 and its ancestors, none for -1. parents [B,C] or [C], as of `window`."""
    parents = _pad_tree(parents, last.shape[0], parents.shape[-1])
    own = last[:, None] == jnp.arange(parents.shape[1], dtype=jnp.int32)[None]
    above = jnp.take_along_axis(ancestors(parents), jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    return own | (above & (last >= 0)[:, None])


def _pad_tree(parents: Array, batch: int, size: int) -> Array:
    """[B,size] int32; what is added is a root, and inert."""
    known = not isinstance(parents, jax.core.Tracer)
    if known and (np.asarray(parents) >= np.arange(parents.shape[-1])).any():
        raise ValueError(f"parents {parents.tolist()}: a token's parent must come before it in the window")
    padded = jnp.pad(parents, [(0, 0)] * (parents.ndim - 1) + [(0, size - parents.shape[-1])], constant_values=-1)
    return jnp.broadcast_to(padded.astype(jnp.int32), (batch, size))


class Pending(NamedTuple):
    """A window that was verified: its `accepted` tokens count and are not yet in the state."""

    keys: Array  # [B,C,K,M]
    updates: Array  # [B,C,K*R,P] float32
    log_decay: Array  # [B,C,K*R]
    accepted: Array  # [B] int32, 0 to C: how many; or of a tree [B,C] bool, the `path` of the last


def step(
    state: Array, pending: Pending, q: Array, k: Array, v: Array, g: Array, beta: Array, parents: Array | None = None
) -> tuple[Array, Array, Array]:
    """One cycle: folds the accepted tokens of the last window in, then verifies the next window from there.

    Returns outputs and updates of the window [B,W,K*R,P], and the committed state. The two windows may differ in width.
    """
    state = fold(state, *pending)
    out, updates = window(q, k, v, g, beta, state, parents)
    return out, updates, state


class _Chunk(NamedTuple):
    """What of a chunk does not depend on the state before it."""

    q: Array  # [B,C,K,M]
    k: Array  # [B,C,K,M]
    from_start: Array  # [B,C,K,R] e^G, the decay of S0 up to each token; 0 if S0 is another segment's
    to_end: Array  # [B,C,K,R] decay from after each token to the chunk's end; 0 if another segment ends the chunk
    scores: Array  # [B,K,R,C,C] (q_i.k_j) e^{G_i-G_j}, j <= i
    own: Array  # [B,C,K,R,P] the solved updates for S0 = 0
    read: Array  # [B,C,K,R,M] what the solved updates take from S0


class _Borders(NamedTuple):
    """Where segments lie in a chunk, or with another axis after B in every chunk."""

    ids: Array  # [B,C] of the tokens
    before: Array  # [B] of S0


def _borders(segment_ids: Array, chunks: int, size: int) -> _Borders:
    """What fills up the last chunk belongs to the last segment, whose state it leaves as it is."""
    padding = chunks * size - segment_ids.shape[1]
    ids = jnp.pad(segment_ids, [(0, 0), (0, padding)], mode="edge").reshape(-1, chunks, size)
    return _Borders(ids, jnp.concatenate([ids[:, :1, 0], ids[:, :-1, -1]], axis=1))


def _prepare(
    borders: _Borders | None, q: Array, k: Array, v: Array, g: Array, beta: Array, *, above: Array | None = None
) -> _Chunk:
    """`above` [B,C,C], of a tree: its `ancestors`. Without it a token is below all that come before it."""
    batch, size, key_heads, _ = k.shape
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    v = v.reshape(batch, size, key_heads, -1, v.shape[-1])
    g, beta = (x.reshape(batch, size, key_heads, -1) for x in (g, beta))
    decay, from_start = _decays(g) if above is None else _tree_decays(g, above)
    if borders is not None:
        same = borders.ids[:, :, None] == borders.ids[:, None, :]
        decay = jnp.where(same[:, None, None], decay, 0.0)
        from_start = jnp.where((borders.ids == borders.before[:, None])[..., None, None], from_start, 0.0)
    scores = _einsum("BIKM,BJKM->BKIJ", q, k)[:, :, None] * decay
    system = _einsum("BIKM,BJKM->BKIJ", k, k)[:, :, None] * decay * jnp.moveaxis(beta, 1, -1)[..., None]
    inverse = unit_lower_inverse(jnp.where(jnp.tri(size, k=-1, dtype=bool), system, 0.0))
    own = _einsum("BKRIJ,BJKRP->BIKRP", inverse, beta[..., None] * v)
    read = _einsum("BKRIJ,BJKRM->BIKRM", inverse, (beta * from_start)[..., None] * k[:, :, :, None])
    return _Chunk(q, k, from_start, jnp.moveaxis(decay[..., -1, :], -1, 1), scores, own, read)


def _decays(g: Array) -> tuple[Array, Array]:
    """Of log decays [B,C,K,R]: e^{G_i-G_j} [B,K,R,i,j], 0 where j > i; and e^G [B,C,K,R]."""
    return jnp.exp(_segment_sums(jnp.moveaxis(g, 1, -1))), jnp.exp(jnp.cumsum(g, axis=1))


def _tree_decays(g: Array, above: Array) -> tuple[Array, Array]:
    """As `_decays`, 0 where j is neither i nor an ancestor of it; each sum is over the tokens between the two."""
    here = above | jnp.eye(above.shape[1], dtype=bool)[None]
    below = jnp.where(above[:, None, None], jnp.moveaxis(g, 1, -1)[..., None], 0.0)  # [B,K,R,l,j]: g_l, l below j
    sums = jnp.where(here[:, None, None], _einsum("BIL,BKRLJ->BKRIJ", here.astype(jnp.float32), below), -jnp.inf)
    return jnp.exp(sums), jnp.exp(_einsum("BIL,BLKR->BIKR", here.astype(jnp.float32), g))


def _segment_sums(g: Array) -> Array:
    """G_i - G_j of log decays [..., C] as [..., i, j]: -inf where j > i, so that its exponential is 0 there.

    Each is summed on its own: after a few strong decays G is in the hundreds, and a difference of two such float32
    sums has lost the small decays between near tokens. Nor may it be e^{G_i} e^{-G_j}, which overflows.
    """
    size = g.shape[-1]
    after = jnp.where(jnp.tri(size, k=-1, dtype=bool), g[..., :, None], 0.0)  # [..., l, j]: g_l where l > j
    sums = _einsum("IL,...LJ->...IJ", jnp.tri(size), after)  # faster than a cumulative sum
    return jnp.where(jnp.tri(size, dtype=bool), sums, -jnp.inf)


def _apply(part: _Chunk, state: Array) -> tuple[Array, Array]:
    """Updates and outputs [B,C,K,R,P] of a chunk that starts from `state` [B,K,R,M,P]."""
    updates = part.own - _einsum("BCKRM,BKRMP->BCKRP", part.read, state)
    out = part.from_start[..., None] * _einsum("BCKM,BKRMP->BCKRP", part.q, state)
    return updates, out + _einsum("BKRIJ,BJKRP->BIKRP", part.scores, updates)


def unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)^-1 for strictly lower triangular [..., n, n], n a power of two.

    Blocks of 1, 2, 4, ... rows are joined by [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]]: substitution by
    blocks, all matrix products. A power series of the whole triangle would lose every digit where keys are alike.
    """
    size = strict.shape[-1]
    lead = strict.shape[:-2]
    inverse = jnp.ones((*lead, size, 1, 1), strict.dtype)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        tiles = strict.reshape(*lead, pairs, 2, block, pairs, 2, block)[..., :, 1, :, :, 0, :]
        lower = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        both = inverse.reshape(*lead, pairs, 2, block, block)
        upper_left, lower_right = both[..., 0, :, :], both[..., 1, :, :]
        joined = -_einsum("...ij,...jk,...kl->...il", lower_right, lower, upper_left)
        top = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([joined, lower_right], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


def _group_state(state: Array, key_heads: int) -> Array:
    return state.astype(jnp.float32).reshape(state.shape[0], key_heads, -1, *state.shape[2:])


def _pad(x: Array, tokens: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, tokens - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
