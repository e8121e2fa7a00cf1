"""Parameters laid over eight devices: where each lies, and that results do not change."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.cache import target_cache
from eagle3_jax.checkpoint.hf import load_target
from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.drafters.eagle3 import Eagle3
from eagle3_jax.errors import ConfigError
from eagle3_jax.sharding import logical_axes, make_mesh
from eagle3_jax.target import Target
from tests.helpers import assert_close
from tests.target import oracle
from tests.target.oracle import Array, quick_jit

# One layer of each kind, with experts; 2 key/value heads, 96 tokens.
CONFIG: dict[str, Any] = {
    **oracle.QWEN3_5_MOE, "vocab_size": 96, "num_hidden_layers": 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MESHES: dict[str, dict[str, int]] = {
    "tensor=2": {"tensor": 2},
    "tensor=4": {"tensor": 4},
    "fsdp=2, tensor=2": {"fsdp": 2, "tensor": 2},
    "expert=2": {"expert": 2},
    "data=2, fsdp=2, expert=2": {"data": 2, "fsdp": 2, "expert": 2},
}
IDS = np.random.default_rng(0).integers(0, 96, (2, 12), dtype=np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    oracle.make_model(CONFIG).save_pretrained(folder)
    return folder


@functools.partial(quick_jit, static_argnums=0)
def run(graph: Any, state: Any, ids: Array, cache: Any) -> tuple[Array, ...]:
    """A whole pass; and the same tokens as a prompt and a window over a cache."""
    target = nnx.merge(graph, state)
    whole = target(ids, aux_layers=(1,))
    prompt, cache = target.prefill(ids[:, :8], jnp.full(2, 8), cache)
    window, cache = target.window(ids[:, 8:], cache.commit(jnp.zeros(2, jnp.int32)))
    pieces = jnp.concatenate([prompt.hidden, window.hidden], axis=1)
    return whole.hidden, whole.aux[0], target.logits(whole.hidden), pieces


def outputs(target: Target, mesh: Mesh | None) -> tuple[Array, ...]:
    graph, state = nnx.split(target)
    cache = target_cache(target.config, 2, 16, 4, dtype=jnp.float32, page_size=8)
    rows = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    return run(graph, state, jax.device_put(IDS, rows), cache)


@pytest.fixture(scope="module")
def unsharded(folder: Path) -> tuple[Array, ...]:
    return outputs(load_target(folder, dtype="float32").model, None)


@pytest.mark.parametrize("name", MESHES)
def test_results_are_those_of_one_device(name: str, folder: Path, unsharded: tuple[Array, ...]) -> None:
    mesh = make_mesh(**MESHES[name])
    target = load_target(folder, dtype="float32", mesh=mesh).model
    for got, want in zip(outputs(target, mesh), unsharded, strict=True):
        assert_close(got, want, 1e-5)
    assert_close(unsharded[3], unsharded[0], 1e-5)


PARTS: dict[str, dict[str, tuple[int, ...]]] = {  # what one device holds
    "tensor=2": {
        "embed_tokens.weight": (48, 40), "lm_head.kernel": (40, 48), "norm.weight": (40,),
        "layers.1.self_attn.q_proj.kernel": (40, 64), "layers.1.self_attn.k_proj.kernel": (40, 16),
        "layers.1.self_attn.o_proj.kernel": (32, 40), "layers.0.linear_attn.in_proj_z.kernel": (40, 48),
        "layers.0.linear_attn.out_proj.kernel": (48, 40), "layers.0.linear_attn.A_log": (8,),
        "layers.0.mlp.experts.gate_proj": (6, 40, 12), "layers.0.mlp.experts.down_proj": (6, 12, 40),
        "layers.0.mlp.shared_expert.down_proj.kernel": (14, 40),
    },
    "tensor=4": {  # two key/value heads on four devices: whole heads, on every device
        "layers.1.self_attn.q_proj.kernel": (40, 32), "layers.1.self_attn.k_proj.kernel": (40, 32),
        "layers.1.self_attn.v_proj.kernel": (40, 32), "layers.1.self_attn.o_proj.kernel": (16, 40),
    },
    "fsdp=2, tensor=2": {
        "embed_tokens.weight": (48, 20), "lm_head.kernel": (20, 48), "layers.1.self_attn.q_proj.kernel": (20, 64),
        "layers.1.self_attn.o_proj.kernel": (32, 20), "layers.0.linear_attn.in_proj_qkv.kernel": (20, 80),
        "layers.0.mlp.experts.up_proj": (6, 20, 12),
    },
    "expert=2": {
        "layers.0.mlp.experts.gate_proj": (3, 40, 24), "layers.0.mlp.experts.down_proj": (3, 24, 40),
        "layers.0.mlp.gate.kernel": (40, 6), "layers.1.self_attn.q_proj.kernel": (40, 128),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_each_parameter_lies_where_the_table_says(name: str, folder: Path) -> None:
    target = load_target(folder, dtype="float32", mesh=make_mesh(**MESHES[name])).model
    flat = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(target))}
    held = {path: flat[path].addressable_shards[0].data.shape for path in PARTS[name]}
    assert held == PARTS[name]


SMALL = {  # parameters that the table leaves whole on every device
    "input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight", "norm.weight",
    "conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias", "mlp.gate.kernel", "shared_expert_gate.kernel",
    "hidden_norm.weight", "input_norm.weight", "o_proj.bias", "down_proj.bias",
}  # fmt: skip


@pytest.mark.parametrize("family", [oracle.QWEN3_5_MOE, oracle.QWEN3_NEXT, oracle.LLAMA, oracle.QWEN2])
def test_the_table_knows_every_large_parameter(family: dict[str, Any]) -> None:
    config = TargetConfig.from_hf(family)
    abstract = nnx.state(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))), nnx.Param)
    unknown = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(abstract) if not logical_axes(path)}
    assert not {name for name in unknown if not name.endswith(tuple(SMALL))}


def test_the_table_knows_every_large_parameter_of_a_drafter() -> None:
    config = DraftConfig(
        hidden_size=32, target_hidden_size=40, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=96, draft_vocab_size=50, aux_layers=(1, 2, 3), rope=RopeConfig(rotary_dim=8), num_layers=2,
        own_embedding=True, norm_before_fc=True, qk_norm=True,
    )  # fmt: skip
    abstract = nnx.state(nnx.eval_shape(lambda: Eagle3(config, rngs=nnx.Rngs(0))), nnx.Param)
    unknown = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(abstract) if not logical_axes(path)}
    assert not {name for name in unknown if not name.endswith(tuple(SMALL))}


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mesh of fsdp=4, tensor=4 needs 16 devices, 8 are here"):
        make_mesh(fsdp=4, tensor=4)
