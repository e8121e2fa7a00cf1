"""Rotary position embedding (Su et al. 2021), with llama3 and YaRN scaling and the interleaved M-RoPE of Qwen3.5."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.config import RopeConfig


def frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Rotation frequencies [rotary_dim/2] (float64) and the factor on cos and sin, as transformers computes them."""
    base = 1.0 / rope.theta ** (np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    params = dict(rope.params)
    if rope.scaling == "linear":
        return base / params["factor"], 1.0
    if rope.scaling == "llama3":
        return _llama3(base, params), 1.0
    if rope.scaling == "yarn":
        return _yarn(base, rope, params)
    return base, 1.0


def _llama3(base: np.ndarray, params: dict[str, float]) -> np.ndarray:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    low, high, context = (
        params["low_freq_factor"],
        params["high_freq_factor"],
        params["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi / base
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * base / params["factor"] + smooth * base


def _yarn(base: np.ndarray, rope: RopeConfig, params: dict[str, float]) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): ramp between extrapolation and interpolation, attention factor."""
    factor, context, dim = params["factor"], params["original_max_position_embeddings"], rope.rotary_dim

    def turn(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turn(params.get("beta_fast", 32.0)), turn(params.get("beta_slow", 1.0))
    if params.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return base / factor * ramp + base * (1 - ramp), _yarn_attention_factor(factor, params)


def _yarn_attention_factor(factor: float, params: dict[str, float]) -> float:
    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if "attention_factor" in params:
        return params["attention_factor"]
    if params.get("mscale") and params.get("mscale_all_dim"):
        return scale(params["mscale"]) / scale(params["mscale_all_dim"])
    return scale(1.0)


def rotation(positions: Array, rope: RopeConfig) -> tuple[Array, Array]:
    """cos and sin [B,T,rotary_dim/2], float32, of positions [B,T], or [3,B,T] (time, height, width) for M-RoPE.

    Interleaved M-RoPE: frequency i turns by height where i = 1 mod 3 and i < 3*section[1], by width where i = 2 mod 3
    and i < 3*section[2], by time elsewhere.
    """
    freqs, factor = frequencies(rope)
    turns = jnp.asarray(freqs, jnp.float32)
    if positions.ndim == 3 and rope.mrope_section:
        index = np.arange(len(freqs))
        axis = np.zeros(len(freqs), np.int32)
        for a in (1, 2):
            axis[(index % 3 == a) & (index < 3 * rope.mrope_section[a])] = a
        chosen = jnp.moveaxis(positions, 0, -1)[..., axis]
    else:
        chosen = (positions[0] if positions.ndim == 3 else positions)[..., None]
    angles = chosen.astype(jnp.float32) * turns[None, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns the leading 2 * cos.shape[-1] dimensions of x [B,T,heads,H] in two halves; float32 inside."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, rest], axis=-1)
