"""The head to train: its config from recipe and target, and its first weights."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from eagle3_jax.checkpoint import load_drafter
from eagle3_jax.checkpoint.formats import read_head
from eagle3_jax.checkpoint.specforge import inexpressible
from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig, check_aux_layers, default_aux_layers
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.layers.norm import RMSNorm
from eagle3_jax.target import Target
from train.data.vocab import choose_draft_vocab
from train.data.vocab_file import read_vocab_file
from train.recipe import DraftRecipe, RecipeError

DEFAULT_DRAFT_VOCAB = 32000


def draft_config(recipe: DraftRecipe, target: TargetConfig) -> DraftConfig:
    """Sizes that the recipe leaves out are the target's. RoPE is one-dimensional over the whole head width.

    Raises:
      ConfigError: sizes or aux layers that cannot be.
    """
    head_dim = recipe.head_dim or target.head_dim
    aux = default_aux_layers(target.num_layers) if recipe.aux_layers is None else recipe.aux_layers
    return DraftConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=recipe.intermediate_size or target.intermediate_size or 4 * target.hidden_size,
        num_heads=recipe.num_heads or target.num_heads,
        num_kv_heads=recipe.num_kv_heads or recipe.num_heads or target.num_kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=_draft_vocab_size(recipe, target.vocab_size),
        aux_layers=check_aux_layers(aux, target.num_layers),
        rope=RopeConfig(recipe.rope_theta or target.rope.theta, head_dim),
        num_layers=recipe.num_layers,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        qk_norm=recipe.architecture == "qwen3",
        norm_before_residual=recipe.norm_before_residual,
        norm_before_fc=recipe.norm_before_fc,
        fc_norm=recipe.fc_norm,
        norm_output=recipe.norm_output,
    )


def planned_config(recipe: DraftRecipe, target: TargetConfig) -> DraftConfig:
    """What the head will be, from configs alone: of the head to go on from, or of a new one.

    Raises:
      CheckpointError, ConfigError: it does not fit the target.
    """
    if recipe.init_from is not None:
        return read_head(recipe.init_from, target).config
    return draft_config(recipe, target)


def _draft_vocab_size(recipe: DraftRecipe, vocab_size: int) -> int:
    if recipe.vocab_file is None:
        return recipe.draft_vocab_size or min(DEFAULT_DRAFT_VOCAB, vocab_size)
    size = len(read_vocab_file(recipe.vocab_file, vocab_size))
    if recipe.draft_vocab_size not in (None, size):
        raise RecipeError(f"draft.draft_vocab_size={recipe.draft_vocab_size}; {recipe.vocab_file} has {size} tokens")
    return size


def draft_vocab(recipe: DraftRecipe, counts: np.ndarray, size: int) -> np.ndarray:
    """Absolute target ids [U] int32: those of `vocab_file`, or else the most frequent by counts [V]."""
    if recipe.vocab_file is not None:
        return read_vocab_file(recipe.vocab_file, len(counts))
    return choose_draft_vocab(counts, size)


def check_exportable(config: DraftConfig) -> None:
    """Better now than after training."""
    if problems := inexpressible(config):
        raise RecipeError(
            f"SpecForge's format cannot express {', '.join(problems)}; change the head, or set export=false and keep "
            "the training checkpoints"
        )


def new_head(config: DraftConfig, d2t: np.ndarray, target: Target, *, seed: int, init_head: bool) -> Eagle3:
    """A float32 head with the draft vocabulary `d2t`; with `init_head`, what it shares with the target starts there."""
    head = Eagle3(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    head.d2t[...] = jnp.asarray(d2t)
    if init_head:
        _start_from(target, head)
    return head


def _start_from(target: Target, head: Eagle3) -> None:
    """The output projection and its norm are the target's, and a norm of aux states that of the layer they enter.

    The target has learned to scale down the few channels of its residual stream that are hundreds of times the others;
    a norm that starts at 1 hands them to `fc` as they are. In offline mode, without the layers, it has to.
    """
    head.norm.weight[...] = _scale(target.norm, target.config)
    head.lm_head.kernel[...] = target.output_rows(head.d2t[...]).astype(jnp.float32)
    if not head.config.fc_norm or not target.layers:
        return
    norms = [layer.input_layernorm for layer in target.layers] + [target.norm]
    for own, boundary in zip(head.fc_norm, head.config.aux_layers, strict=True):
        own.weight[...] = _scale(norms[boundary], target.config)


def _scale(norm: RMSNorm, config: TargetConfig) -> Array:
    weight = norm.weight[...].astype(jnp.float32)
    return 1 + weight if config.zero_centered_norm else weight


def existing_head(path: str | Path, target: Target, mesh: Mesh | None) -> tuple[Eagle3, tuple[str, ...]]:
    """A head to go on from, in float32, and notes on what its folder left open. Its vocabulary and aux layers stay."""
    embed = target.embed_tokens.weight[...]
    loaded = load_drafter(path, target.config, dtype=jnp.float32, mesh=mesh, embed=embed)
    return loaded.model, loaded.notes
