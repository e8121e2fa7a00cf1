"""Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), element by element.

Plain jnp, usable inside a kernel too. jax.random.bits(key, (V,)) is `bits(key, arange(V))`: noise can be had for some
tokens without drawing it for the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def bits(key: tuple[Array, Array], index: Array) -> Array:
    """uint32 random bits of element `index` (uint32, any shape) under a key of two uint32 that broadcast with it."""
    first, second = key
    schedule = (first, second, first ^ second ^ jnp.uint32(PARITY))
    # A counter of 64 bits, whose upper half is 0.
    y = index + second
    x = jnp.broadcast_to(first, y.shape)
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ _rotated(y, rotation)
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x ^ y


def _rotated(x: Array, distance: int) -> Array:
    left = jax.lax.shift_left(x, jnp.full_like(x, distance))
    return left | jax.lax.shift_right_logical(x, jnp.full_like(x, 32 - distance))


def gumbel(words: Array) -> Array:
    """float32 standard Gumbel numbers from uint32 `words`, all 32 bits of each.

    The large values, the only ones that decide an argmax, come from small uniforms, where floats are fine.
    """
    upper, lower = words >> 16, words & jnp.uint32(0xFFFF)
    # The sum is rounded once, as a conversion of the whole word would be; a TPU converts signed words only.
    whole = upper.astype(jnp.int32).astype(jnp.float32) * 65536.0 + lower.astype(jnp.int32).astype(jnp.float32)
    uniform = (whole + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))  # the largest words round to 1, whose log1p is -inf
    return -jnp.log(-jnp.log1p(-uniform))
