"""How a new head begins."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.train.models import make_drafter, make_target
from train.head import new_head


def test_what_a_head_shares_with_its_target_starts_from_it() -> None:
    target = make_target()
    for layer in target.layers:
        layer.input_layernorm.weight[...] = layer.input_layernorm.weight[...] * 0.25 + 0.5
    config = make_drafter(fc_norm=True).config
    d2t = np.arange(config.draft_vocab_size, dtype=np.int32)[::-1].copy()
    head = new_head(config, d2t, target, seed=0, init_head=True)
    offset = float(target.config.zero_centered_norm)
    np.testing.assert_array_equal(head.lm_head.kernel[...], target.output_rows(jnp.asarray(d2t)))
    np.testing.assert_array_equal(head.norm.weight[...], target.norm.weight[...] + offset)
    for own, boundary in zip(head.fc_norm, config.aux_layers, strict=True):
        expected = target.norm if boundary == target.config.num_layers else target.layers[boundary].input_layernorm
        np.testing.assert_array_equal(own.weight[...], expected.weight[...] + offset)


def test_without_layers_or_by_request_it_starts_from_ones() -> None:
    target = make_target()
    config = make_drafter(fc_norm=True).config
    d2t = np.arange(config.draft_vocab_size, dtype=np.int32)
    assert (new_head(config, d2t, target, seed=0, init_head=False).norm.weight[...] == 1).all()
    target.layers = nnx.List([])
    offline = new_head(config, d2t, target, seed=0, init_head=True)
    assert all((norm.weight[...] == 1).all() for norm in offline.fc_norm)
