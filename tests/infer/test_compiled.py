"""What the compiler makes of the cycle on a real TPU topology: caches in place, nothing of them copied in the loop."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from eagle3_jax.config import DELTA, FULL, DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.target import Target
from infer.cycle import DecodeState, Speculation, run_cycles
from infer.engine import EngineConfig, empty_state

TARGET = TargetConfig(
    model_type="qwen3_5", vocab_size=2048, hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=256, layer_types=(DELTA, FULL), rope=RopeConfig(rotary_dim=64, mrope_section=(11, 11, 10)),
    qk_norm=True, attn_output_gate=True, zero_centered_norm=True, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
DRAFT = DraftConfig(
    hidden_size=512, target_hidden_size=512, intermediate_size=1024, num_heads=4, num_kv_heads=2, head_dim=128,
    vocab_size=2048, draft_vocab_size=1024, aux_layers=(0, 1, 2), rope=RopeConfig(rotary_dim=128),
)  # fmt: skip
ENGINE = EngineConfig(max_num_seqs=4, max_model_len=1000, speculation=Speculation(3), dtype=jnp.bfloat16)


def abstract(model: Any, config: Any) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: model(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize("topology", ["v5e:2x2"])
def test_the_loop_keeps_its_caches_in_place(topology: str) -> None:
    (target_graph, target), (draft_graph, draft) = abstract(Target, TARGET), abstract(Eagle3, DRAFT)
    state: DecodeState = jax.eval_shape(lambda: empty_state(TARGET, DRAFT, ENGINE))

    def generate(target: Any, draft: Any, state: DecodeState) -> DecodeState:
        models = nnx.merge(target_graph, target), nnx.merge(draft_graph, draft)
        return run_cycles(*models, state, ENGINE.speculation, jnp.int32(8), jnp.int32(9))

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    arguments = jax.tree.map(place, (target, draft, state))
    compiled = jax.jit(generate, donate_argnums=2).lower(*arguments).compile()

    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * memory.output_size_in_bytes, "the state is not donated"
    pages, delta = state.target.layers[1], state.target.layers[0]
    for cache in (pages.keys, delta.state):
        shape = ",".join(map(str, cache.shape))
        copies = [line for line in while_body(compiled.as_text()) if re.search(rf"\[{shape}\]\S* copy\(", line)]
        assert not copies, f"the loop copies {shape}: {copies[0][:200]}"


def while_body(text: str) -> list[str]:
    """Lines of the computation that the generation loop repeats."""
    computations = re.split(r"\n(?=%|ENTRY)", text)
    names = set(re.findall(r"while\(.*?body=(%[\w.\-]+)", text))
    bodies = [c.splitlines() for c in computations if c.split(" ")[0] in names]
    assert bodies, "no loop in the program"
    return max(bodies, key=len)
