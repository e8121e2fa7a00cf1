"""Causal attention by cuDNN's flash attention: what it can do, and how it is told of packed rows.

Packed rows are given either as runs, where each begins and how long it is, so that nothing between two of them is
computed, or as a mask of T x T beside causality, of which all is.

cuDNN's gradient takes float32 room for as many tokens as there may be runs times the longest that one may be. So runs
are told apart by their length, and each level is a call of its own: at most 3 can be longer than a quarter of a row,
15 longer than a sixteenth, and so on; with room for 4 x T tokens at every level.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import dispatch

_CUTS = (1, 4, 16, 64)  # the longest run of a level is T over this; it has room for 4 times as many of them
_SHORTEST = 32  # tokens of the longest run of the last level
_LONGEST_MASKED = 8192  # the mask is a bias of T x T, 128 MB a row at this length
_LARGEST_OFFSET = 2**31 - 1  # cuDNN's offsets are int32, in elements


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Level:
    """Runs of about one length, M of a row (more, and they do not `fit`) and S = T / cut tokens long at most.

    own: [B,T] bool, which tokens are of one. slots, places: [B,T] int32, which run of the level, and where in it.
    starts, lengths: [B,M] int32; T and 0 beyond the last.
    """

    own: Array
    slots: Array
    places: Array
    starts: Array
    lengths: Array
    cut: int = dataclasses.field(metadata={"static": True})

    def by_token(self, log_sum: Array) -> Array:
        """[B,N,T] of cuDNN's [B*M,N,S], where each run counts its own tokens from 0."""
        rows = jnp.arange(self.own.shape[0])[:, None]
        runs = log_sum.reshape(*self.starts.shape, *log_sum.shape[1:])
        return jnp.moveaxis(runs.at[rows, self.slots, :, self.places].get(mode="clip"), 1, 2)

    def by_run(self, log_sum: Array) -> Array:
        """cuDNN's [B*M,N,S] of [B,N,T]; what lies beyond a run's end is some finite number."""
        tokens = self.own.shape[1]
        at = self.starts[..., None] + jnp.arange(tokens // self.cut)[None, None]  # [B,M,S]
        runs = jax.vmap(lambda x, at: jnp.moveaxis(x[:, at], 0, 1))(log_sum, jnp.minimum(at, tokens - 1))
        return runs.reshape(-1, *runs.shape[2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of equal segment ids [B,T], all of them if `fit` [] is True. Padding is a run too."""

    levels: tuple[Level, ...]
    fit: Array

    @classmethod
    def of(cls, segment_ids: Array) -> Runs:
        tokens = segment_ids.shape[1]
        index = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], segment_ids.shape)
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)], constant_values=True)
        starts = lax.cummax(jnp.where(begins, index, 0), axis=1)
        later = jnp.pad(begins[:, 1:], [(0, 0), (0, 1)], constant_values=True)
        lengths = lax.cummin(jnp.where(later, index + 1, tokens), axis=1, reverse=True) - starts
        cuts = [cut for cut in _CUTS if tokens % cut == 0 and tokens // cut >= _SHORTEST] or [1]
        levels, fit = [], jnp.bool_(True)
        for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
            own = (lengths <= tokens // cut) & (lengths > (tokens // following if following else 0))
            number = jnp.cumsum(begins & own, axis=1, dtype=jnp.int32)
            fit = fit & jnp.all(number <= 4 * cut)
            at = jnp.where(begins & own, number - 1, 4 * cut)
            rows = jnp.arange(segment_ids.shape[0])[:, None]
            put = lambda values, none, at=at, rows=rows, cut=cut: (
                jnp.full((values.shape[0], 4 * cut), none, jnp.int32).at[rows, at].set(values, mode="drop")
            )
            levels.append(Level(own, number - 1, index - starts, put(starts, tokens), put(lengths, 0), cut))
        return cls(tuple(levels), fit)


def check(q: Array, k: Array, packed: bool = False) -> None:
    """Raises NotImplementedError for what cuDNN cannot do, on this GPU, with q [B,T,N,H] and k [B,T,K,H].

    jax's own checks are asked, which its primitives do not make. packed: rows by their runs.
    """
    if jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN needs an NVIDIA GPU")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN attends in bfloat16 or float16, not {q.dtype}")
    from jax._src.cudnn import fused_attention_stablehlo as module

    try:
        version = module.check_cudnn_version()
    except RuntimeError as error:
        raise NotImplementedError(str(error)) from error
    layout = module.AttentionLayout.BTNH.value
    module.check_is_flash_attention(q, k, k, layout, version, has_bias=False, is_training=True, is_packed=packed)


def check_runs(q: Array) -> None:
    """Raises NotImplementedError where runs cannot be told to cuDNN."""
    if dispatch.is_spread():
        raise NotImplementedError("packed rows by their runs are for one device, not for a mesh")
    if q.size > _LARGEST_OFFSET:
        raise NotImplementedError(f"{q.size} elements of packed rows: cuDNN counts them in int32")


def check_mask(q: Array) -> None:
    """Raises NotImplementedError where a mask of T x T would be too large, or cuDNN's gradient cannot take it."""
    if q.shape[1] > _LONGEST_MASKED:
        raise NotImplementedError(f"packed rows of {q.shape[1]} tokens: their mask would be too large")
    if q.shape[1] % 2:
        raise NotImplementedError(f"packed rows of {q.shape[1]} tokens: cuDNN's gradient takes an even number")


def segment_mask(segment_ids: Array | None) -> Array | None:
    """[B,1,T,T] bool."""
    return None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
