"""What is trained and what is not."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tests.train.models import make_drafter
from train.params import split_drafter


def test_embedding_and_vocabulary_map_are_not_trained() -> None:
    drafter = make_drafter(own_embedding=True, fc_norm=True)
    _, params, fixed = split_drafter(drafter)
    assert {"fc.kernel", "fc_norm.2.weight", "layers.0.self_attn.q_proj.kernel", "lm_head.kernel"} <= set(params)
    assert not any("embed_tokens" in name or "d2t" in name for name in params)
    assert {x.shape for x in fixed} == {(97, 16), (41,)}


def test_parameters_are_float32_copies_and_merge_back() -> None:
    drafter = make_drafter()
    drafter.fc.kernel[...] = drafter.fc.kernel[...].astype(jnp.bfloat16)
    graph, params, fixed = split_drafter(drafter)
    assert {x.dtype for x in params.values()} == {jnp.dtype("float32")}
    merged = graph.merge(params, fixed, jnp.bfloat16)
    assert merged.lm_head.kernel[...].dtype == merged.norm.weight[...].dtype == jnp.bfloat16
    assert np.array_equal(merged.d2t[...], drafter.d2t[...])
    assert set(graph.head(params)) == {"norm.weight", "lm_head.kernel"}
    head = graph.merge_head(graph.head(params), fixed, jnp.bfloat16)
    assert head.lm_head.kernel[...].dtype == head.norm.weight[...].dtype == jnp.bfloat16
