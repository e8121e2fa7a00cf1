"""Collectives are read from a program's text: kinds, bytes, groups, and loops counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eagle3_jax.meshes import parse_mesh
from eagle3_jax.planning.collectives import Collective, by_kind, collectives, moved

TEXT = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %all-reduce.1 = f32[8,4]{1,0:T(8,128)} all-reduce(%x), channel_id=1, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, to_apply=%add
  %meanwhile = f32[8] fusion(%y), kind=kCustom, calls=%async_end
  ROOT %fusion.9 = (s32[], f32[8,4]) fusion(%y), kind=kCustom, calls=%fused
}

%fused (p: bf16[2,4]) -> bf16[8,4] {
  ROOT %all-gather.2 = bf16[8,4]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
}

%condition (p: (s32[], f32[8,4])) -> pred[] {
  %constant.7 = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[]{:T(512)} compare(%get-tuple-element.1, %constant.7), direction=LT
}

%quiet (p: f32[3]) -> f32[3] {
  ROOT %r = f32[3] add(%p, %p)
}

%loud (p: f32[3]) -> f32[3] {
  ROOT %reduce-scatter.3 = f32[3]{0} reduce-scatter(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%async_start (p: f32[2]) -> f32[8] {
  ROOT %all-gather.4 = f32[8]{0} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
}

%async_end (p: f32[2]) -> f32[8] {
  ROOT %all-gather.5 = f32[8]{0} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %while.1 = (s32[], f32[8,4]) while(%init), condition=%condition, body=%body
  %conditional.1 = f32[3] conditional(%p, %a, %b), true_computation=%quiet, false_computation=%loud
  %start = (bf16[4,256]{1,0}, bf16[4,256]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%z), source_target_pairs={{0,1},{1,0}}
  %done = bf16[4,256]{1,0} collective-permute-done(%start)
  %begun = (f32[2], f32[8]) fusion(%z), kind=kCustom, calls=%async_start
  %ended = f32[8] fusion(%begun), kind=kCustom, calls=%async_end
  %self = f32[4] collective-permute(%z), source_target_pairs={{0,0},{1,1}}
  %pair = (f32[2], s8[4]) all-reduce(%a, %b), replica_groups={{0,1}}, to_apply=%add
}
"""  # noqa: E501


def test_a_text() -> None:
    found = collectives(TEXT)
    assert found == {
        Collective("all-reduce", 128, 2): 5,
        Collective("all-gather", 64, 4): 5,
        Collective("reduce-scatter", 12, 4): 1,
        Collective("collective-permute", 2048, 2): 1,
        Collective("all-reduce", 12, 2): 1,
        Collective("all-gather", 32, 4): 1,
    }
    assert by_kind(found)["all-reduce"] == (6, 5 * 128 + 12)
    assert moved(found) == 5 * 128 + 12 + 5 * 64 * 3 / 4 + 12 * 3 + 2048 + 32 * 3 / 4


@pytest.mark.parametrize("trips", [1, 6])
def test_a_program(trips: int) -> None:
    """A row-parallel product inside a loop: one sum of its result each time around."""
    mesh = parse_mesh("tp8").mesh()
    x, w = (jnp.ones((4, 16)), jnp.ones((16, 16)))
    by_column, by_row = NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P("tensor"))

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        product = lambda i, x: jax.lax.with_sharding_constraint(jnp.sin(x) @ w, by_column)
        whole = lambda i, x: jax.lax.with_sharding_constraint(product(i, x), NamedSharding(mesh, P()))
        return jax.lax.fori_loop(0, trips, lambda i, x: whole(i, x), x)

    text = jax.jit(loop).lower(x, jax.device_put(w, by_row)).compile().as_text()
    found = collectives(text)
    assert sum(times for c, times in found.items() if c.devices == 8) % trips == 0
    assert moved(found) >= trips * 4 * 16 * 4 * 7 / 8
