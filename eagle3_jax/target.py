"""The target: one hybrid decoder for Qwen3.5, Qwen3-Next, Qwen3, Qwen2 and Llama, dense or mixture of experts.

Boundary b is the residual stream that enters layer b, before its norm: 0 the embeddings, L what leaves the last layer.
Every pass can return the boundaries a drafter asks for; asking for none computes none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from eagle3_jax.cache import Cache, DeltaState, KVPages
from eagle3_jax.config import DELTA, TargetConfig, check_aux_layers
from eagle3_jax.layers.attention import Attention, AttentionShape
from eagle3_jax.layers.gated_delta_net import GatedDeltaNet
from eagle3_jax.layers.linear import Embedding, Linear
from eagle3_jax.layers.mlp import MLP
from eagle3_jax.layers.moe import MoE
from eagle3_jax.layers.norm import RMSNorm
from eagle3_jax.layers.rope import rotation
from eagle3_jax.per_device import divides, per_device
from eagle3_jax.segments import segment_positions
from eagle3_jax.sharding import attention_axes, pin, pin_rows
from pallas_kernels import dispatch
from pallas_kernels.attention import causal_attention, paged_attention, write_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """`hidden` [B,T,D] after the final norm; `aux`, one [B,T,D] for each boundary asked for."""

    hidden: Array
    aux: tuple[Array, ...]


class DecoderLayer(nnx.Module):
    """Norm, token mixer (attention or delta rule), norm, feed-forward or mixture. `Target._decode` adds them up."""

    def __init__(self, config: TargetConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        c = config
        norm = partial(RMSNorm, c.hidden_size, c.rms_norm_eps, zero_centered=c.zero_centered_norm, dtype=dtype)
        self.input_layernorm = norm()
        if c.layer_types[index] == DELTA:
            self.linear_attn = GatedDeltaNet(c, dtype=dtype, rngs=rngs)
        else:
            self.self_attn = Attention(_attention_shape(c), dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm()
        if c.moe_layers and c.moe_layers[index]:
            self.mlp: MoE | MLP = MoE(c, dtype=dtype, rngs=rngs)
        else:
            self.mlp = MLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, rngs=rngs)


def _attention_shape(c: TargetConfig) -> AttentionShape:
    return AttentionShape(
        d_in=c.hidden_size,
        d_out=c.hidden_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        norm_eps=c.rms_norm_eps,
        qk_norm=c.qk_norm,
        zero_centered_norm=c.zero_centered_norm,
        output_gate=c.attn_output_gate,
        bias=c.attention_bias,
        out_bias=c.attention_out_bias,
    )


Mixer = Callable[[int, DecoderLayer, Array], Array]


class Target(nnx.Module):
    """The model that is right. Parameter paths are Hugging Face names less `model.`; linears are `kernel` [in, out]."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, zero_centered=config.zero_centered_norm, dtype=dtype
        )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        self.config = config

    def merge_projections(self) -> Target:
        """Puts projections of one input side by side, in place, for running on one device; see `layers.merged`."""
        for _, module in nnx.iter_modules(self):
            if isinstance(module, (GatedDeltaNet, Attention, MLP)):
                module.merge()
        return self

    def embed(self, token_ids: Array) -> Array:
        """Token embeddings [B,T,D]."""
        return self.embed_tokens(token_ids)

    def logits(self, hidden: Array) -> Array:
        """float32 logits [..., V] of hidden states after the final norm."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.attend(hidden)
        return jnp.matmul(hidden, self.lm_head.kernel[...], preferred_element_type=jnp.float32)

    def output_rows(self, token_ids: Array) -> Array:
        """The output projection's columns [D, U] of some tokens [U]: what a teacher over a draft vocabulary needs."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.weight[...][token_ids].T
        return self.lm_head.kernel[...][:, token_ids]

    def __call__(
        self,
        token_ids: Array | None = None,
        *,
        inputs_embeds: Array | None = None,
        positions: Array | None = None,
        attention_mask: Array | None = None,
        segment_ids: Array | None = None,
        aux_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """One pass over whole sequences, without a cache.

        Args:
          token_ids: [B,T] int32, or instead of them inputs_embeds [B,T,D].
          positions: [B,T], or [3,B,T] for M-RoPE; by default each row, or segment, counts its own tokens from 0.
          attention_mask: [B,T], False (0) on padding, which may stand left or right. Padding never reaches a real
            token; what comes out at padded places is meaningless.
          segment_ids: [B,T] int32 of packed rows, see `eagle3_jax.segments`: every segment gives what it gives alone.
          aux_layers: boundaries to return, ascending.
        """
        if token_ids is not None and inputs_embeds is None:
            x = self.embed(token_ids)
        elif token_ids is None and inputs_embeds is not None:
            x = inputs_embeds
        else:
            raise ValueError("give either token_ids or inputs_embeds")
        if attention_mask is None:
            return self._uncached(x, positions, None, segment_ids, aux_layers)
        # Inside, padding stands right: each row's tokens are moved to its front and back again.
        mask = attention_mask.astype(bool)
        x = jnp.where(mask[..., None], x, 0)  # a NaN in padding would pass through a product with a weight of zero
        front = jnp.argsort(~mask, axis=1, stable=True)
        back = jnp.argsort(front, axis=1)
        moved = (
            None
            if positions is None
            else jnp.take_along_axis(positions, front.reshape((1,) * (positions.ndim - 2) + front.shape), axis=-1)
        )
        ids = None if segment_ids is None else jnp.take_along_axis(segment_ids, front, axis=1)
        out = self._uncached(_take(x, front), moved, jnp.sum(mask, axis=1), ids, aux_layers)
        return jax.tree.map(lambda y: _take(y, back), out)

    def _uncached(
        self,
        x: Array,
        positions: Array | None,
        num_valid: Array | None,
        segment_ids: Array | None,
        aux_layers: Sequence[int],
    ) -> TargetOutput:
        tokens = jnp.arange(x.shape[1])[None]
        valid = None if num_valid is None else tokens < num_valid[:, None]
        if positions is None:
            counted = jnp.broadcast_to(tokens, x.shape[:2])
            positions = counted if segment_ids is None else segment_positions(segment_ids)
        cos_sin = rotation(positions, self.config.rope)

        def mixer(i: int, layer: DecoderLayer, h: Array) -> Array:
            if self.config.layer_types[i] == DELTA:
                return layer.linear_attn(h, valid, segment_ids)
            return layer.self_attn(h, cos_sin, partial(causal_attention, segment_ids=segment_ids))

        return self._decode(x, mixer, aux_layers, dispatch.REFERENCE)  # what has gradients

    def prefill(
        self, token_ids: Array, num_valid: Array, cache: Cache, *, aux_layers: Sequence[int] = ()
    ) -> tuple[TargetOutput, Cache]:
        """A chunk [B,T] of prompts, committed at once: the first `num_valid` [B] tokens of each row (0: left alone)."""
        x = self.embed(token_ids)
        valid = jnp.arange(x.shape[1])[None] < num_valid[:, None]

        def delta(layer: GatedDeltaNet, h: Array, past: DeltaState) -> tuple[Array, DeltaState]:
            return layer.prefill(h, valid, num_valid, cache.pending, past)

        out, layers = self._cached(x, valid, cache, delta, aux_layers)
        return out, cache.replace(
            layers=layers, lengths=cache.lengths + num_valid, pending=jnp.zeros_like(cache.pending)
        )

    def window(self, token_ids: Array, cache: Cache, *, aux_layers: Sequence[int] = ()) -> tuple[TargetOutput, Cache]:
        """Tokens [B,W] to verify, W as the cache was made for. Nothing counts until `cache.commit(accepted)`."""
        x = self.embed(token_ids)
        valid = jnp.ones(x.shape[:2], bool)

        def delta(layer: GatedDeltaNet, h: Array, past: DeltaState) -> tuple[Array, DeltaState]:
            return layer.window(h, valid, cache.pending, past)

        out, layers = self._cached(x, valid, cache, delta, aux_layers)
        return out, cache.replace(layers=layers, pending=jnp.zeros_like(cache.pending))

    def _cached(
        self,
        x: Array,
        valid: Array,
        cache: Cache,
        delta: Callable[[GatedDeltaNet, Array, DeltaState], tuple[Array, DeltaState]],
        aux_layers: Sequence[int],
    ) -> tuple[TargetOutput, tuple[KVPages | DeltaState, ...]]:
        positions = cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        cos_sin = rotation(positions, self.config.rope)
        layers = list(cache.layers)

        def mixer(i: int, layer: DecoderLayer, h: Array) -> Array:
            past = layers[i]
            if isinstance(past, DeltaState):
                out, layers[i] = delta(layer.linear_attn, h, past)
                return out

            def attend(q: Array, k: Array, v: Array) -> Array:
                out, layers[i] = attend_pages(past, cache, positions, valid, q, k, v)
                return out

            return layer.self_attn(h, cos_sin, attend)

        return self._decode(x, mixer, aux_layers, None), tuple(layers)

    def _decode(self, x: Array, mixer: Mixer, aux_layers: Sequence[int], norms: str | None) -> TargetOutput:
        """`norms`: which implementation adds and norms. What a block gives is added by the norm that comes next."""
        wanted, aux = check_aux_layers(aux_layers, self.config.num_layers), []
        y: Array | None = None
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                with jax.named_scope("delta_rule" if self.config.layer_types[i] == DELTA else "attention"):
                    x, normed = _add(layer.input_layernorm, x, y, norms)
                    if i in wanted:
                        aux.append(x)
                    y = mixer(i, layer, normed)
                with jax.named_scope("mlp"):
                    x, normed = _add(layer.post_attention_layernorm, x, y, norms)
                    y = layer.mlp(normed)
        x, normed = _add(self.norm, x, y, norms)
        if self.config.num_layers in wanted:
            aux.append(x)
        if len(aux) != len(wanted):
            raise AssertionError(f"captured {len(aux)} aux states, {len(wanted)} were asked for")
        return TargetOutput(normed, tuple(aux))


def _add(norm: RMSNorm, x: Array, y: Array | None, implementation: str | None) -> tuple[Array, Array]:
    """The stream x with what a block adds to it, and its norm."""
    if y is None:
        return x, norm(x)
    if dispatch.is_spread():  # the sum is put in its place before anything is made of it
        x = pin_rows(x + y)
        return x, norm(x)
    return norm.add(x, y, implementation)


def attend_pages(
    pages: KVPages, cache: Cache, positions: Array, valid: Array, q: Array, k: Array, v: Array
) -> tuple[Array, KVPages]:
    """Writes k and v [B,T,K,H] at `positions` of one layer's pages, then lets q see up to its own position.

    On a mesh all of it is held to where the cache lies, and each device does its part: what moves between devices is
    queries and results.
    """
    by_heads = ("slots", "replicated", "heads", "replicated")  # as the projections around this have it
    slots, heads = attention_axes(pages.keys.shape[0], cache.lengths.shape[0])
    rows, stored = (slots, "replicated", heads, "replicated"), (heads, slots, "replicated", "replicated")
    q, k, v = (pin(pin(x, *by_heads), *rows) for x in (q, k, v))
    args = (q, k, v, pages.keys, pages.values, cache.page_table, positions, valid)
    attend = partial(_write_and_attend, contiguous=cache.contiguous)
    if divides(heads, pages.keys.shape[0]) and divides(slots, len(q)) and cache.contiguous:
        table = (slots, "replicated")
        inputs = (rows, rows, rows, stored, stored, table, table, table)
        out, keys, values = per_device(attend, args, inputs, (rows, stored, stored))
    else:
        out, keys, values = attend(*args)
    keys, values = pin(keys, *stored), pin(values, *stored)
    return pin(pin(out, *rows), *by_heads), KVPages(keys, values)


def _write_and_attend(
    q: Array, k: Array, v: Array, keys: Array, values: Array, table: Array, positions: Array, valid: Array,
    *, contiguous: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    if contiguous:  # also where these are some of the slots, and their pages some of the pages
        table = jnp.arange(table.size, dtype=table.dtype).reshape(table.shape)
    keys, values = (write_pages(old, new, table, positions, valid) for old, new in ((keys, k), (values, v)))
    return paged_attention(q, keys, values, table, positions, contiguous=contiguous), keys, values


def _take(x: Array, order: Array) -> Array:
    return jnp.take_along_axis(x, order[..., None], axis=1)
