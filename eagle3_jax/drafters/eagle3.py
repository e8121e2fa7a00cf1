"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): a small decoder that guesses from three depths of the target.

At position p it takes the target's aux states of p and the embedding of token p+1, and predicts token p+2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.cache import Cache, KVPages
from eagle3_jax.config import DraftConfig
from eagle3_jax.layers.attention import Attention, AttentionShape
from eagle3_jax.layers.linear import Embedding, Linear, logits
from eagle3_jax.layers.mlp import MLP
from eagle3_jax.layers.norm import RMSNorm
from eagle3_jax.layers.rope import rotation
from eagle3_jax.target import attend_pages
from pallas_kernels import dispatch

AttendLayer = Callable[[int, Array, Array, Array], Array]
"""(layer, q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) -> [B,T,N,H]."""


class DraftVocab(nnx.Variable):
    """Absolute target ids of the draft vocabulary: a table, not a parameter."""


class DraftLayer(nnx.Module):
    """One decoder layer. The first reads [norm(embedding) | norm(hidden)], twice the width; later ones are ordinary."""

    def __init__(self, config: DraftConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        c, first = config, index == 0
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        if first:
            self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        shape = AttentionShape(
            d_in=c.hidden_size * (2 if first else 1),
            d_out=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            norm_eps=c.rms_norm_eps,
            qk_norm=c.qk_norm,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
        )
        self.self_attn = Attention(shape, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)


class Eagle3(nnx.Module):
    """The head and all its flags (see `DraftConfig`). Embeddings come from the caller: usually the target's own."""

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> None:
        c, fused = config, len(config.aux_layers) * config.target_hidden_size
        self.fc = Linear(fused, c.hidden_size, dtype=dtype, rngs=rngs)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(fused, c.rms_norm_eps, dtype=dtype)
        if c.fc_norm:
            self.fc_norm = nnx.List([RMSNorm(c.target_hidden_size, c.rms_norm_eps, dtype=dtype) for _ in c.aux_layers])
        self.layers = nnx.List([DraftLayer(c, i, dtype=dtype, rngs=rngs) for i in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(c.hidden_size, c.draft_vocab_size, dtype=dtype, rngs=rngs)
        if c.own_embedding:
            self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype=dtype, rngs=rngs)
        self.d2t = DraftVocab(jnp.arange(c.draft_vocab_size, dtype=jnp.int32))
        self.config = config

    def combine(self, aux: Sequence[Array]) -> Array:
        """Features [B,T,D] of aux states, one [B,T,Dt] for each boundary of the config."""
        if len(aux) != len(self.config.aux_layers):
            raise ValueError(f"{len(aux)} aux states given, the head was made for boundaries {self.config.aux_layers}")
        states = list(aux)
        if self.config.fc_norm:
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
        fused = jnp.concatenate(states, axis=-1)
        if self.config.norm_before_fc:
            fused = self.input_norm(fused)
        return self.fc(fused)

    def block(
        self, embeds: Array, hidden: Array, positions: Array, attend: AttendLayer, *,
        norms: str | None = dispatch.REFERENCE,
    ) -> Array:  # fmt: skip
        """The decoder layers: embeddings of token p+1 and features (or fed-back states) of p [B,T,D] -> [B,T,D].

        `positions` [B,T] are those of the features. The result is before the final norm. `norms`: which implementation
        adds and norms; the reference has gradients.
        """
        cos_sin = rotation(positions, self.config.rope)
        for i, layer in enumerate(self.layers):
            if i == 0:
                normed = layer.hidden_norm(hidden)
                residual = normed if self.config.norm_before_residual else hidden
                x = jnp.concatenate([layer.input_layernorm(embeds), normed], axis=-1)
            else:
                residual, x = hidden, layer.input_layernorm(hidden)
            attended = layer.self_attn(x, cos_sin, partial(attend, i))
            hidden, normed = layer.post_attention_layernorm.add(residual, attended, norms)
            hidden = hidden + layer.mlp(normed)
        return hidden

    def logits(self, hidden: Array) -> Array:
        """float32 logits [..., U] over the draft vocabulary."""
        return logits(self.norm(hidden), self.lm_head.kernel[...])

    def feedback(self, hidden: Array) -> Array:
        """What the next draft step takes in place of features: the block's output, normed only with `norm_output`."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def cached_block(
        self, embeds: Array, hidden: Array, positions: Array, valid: Array, cache: Cache
    ) -> tuple[Array, Cache]:
        """`block` over the drafter's own keys and values; writes at `positions` [B,T] where `valid` [B,T]."""
        layers = list(cache.layers)

        def attend(i: int, q: Array, k: Array, v: Array) -> Array:
            pages = layers[i]
            assert isinstance(pages, KVPages)
            out, layers[i] = attend_pages(pages, cache, positions, valid, q, k, v)
            return out

        return self.block(embeds, hidden, positions, attend, norms=None), cache.replace(layers=tuple(layers))
