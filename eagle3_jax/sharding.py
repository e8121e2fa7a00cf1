"""The one table from what an axis means to where it lies.

Parameters are told apart by the end of their path; each gets logical axes, and `MESH_AXES` maps those to the mesh.
An axis that does not divide (key/value heads fewer than the tensor axis, say) is replicated. Meshes are Auto: XLA
carries the layout through the program. "pjit" today is `jax.jit` with shardings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.errors import ConfigError

MESH_AXES: dict[str, str | None] = {
    "batch": "data",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",
    "replicated": None,
}

_PARAMETERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"embed_tokens\.weight", ("vocab", "embed")),
    (r"lm_head\.kernel", ("embed", "vocab")),
    (r"experts\.gate_up_proj", ("expert", "embed", "mlp")),
    (r"experts\.down_proj", ("expert", "mlp", "embed")),
    (r"self_attn\.[qkv]_proj\.kernel", ("embed", "heads")),
    (r"self_attn\.[qkv]_proj\.bias", ("heads",)),
    (r"self_attn\.o_proj\.kernel", ("heads", "embed")),
    (r"linear_attn\.in_proj_(qkv|z|a|b)\.kernel", ("embed", "heads")),
    (r"linear_attn\.out_proj\.kernel", ("heads", "embed")),
    (r"(gate|up)_proj\.kernel", ("embed", "mlp")),
    (r"down_proj\.kernel", ("mlp", "embed")),
    (r"fc\.kernel", ("replicated", "embed")),
)

# Which field of a config counts the heads side by side on a "heads" axis: a head is never cut in two.
_HEADS: tuple[tuple[str, str], ...] = (
    (r"self_attn\.[kv]_proj\.", "num_kv_heads"),
    (r"self_attn\.[qo]_proj\.", "num_heads"),
    (r"linear_attn\.in_proj_qkv\.", "linear_num_key_heads"),
    (r"linear_attn\.(in_proj_z|out_proj)\.", "linear_num_value_heads"),
)


def make_mesh(
    *, data: int = 1, fsdp: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of axes data, fsdp, expert, tensor over the first devices.

    Raises:
      ConfigError: fewer devices than the axes ask for.
    """
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    have = list(jax.devices() if devices is None else devices)
    need = int(np.prod(list(sizes.values())))
    if need > len(have):
        asked = ", ".join(f"{k}={v}" for k, v in sizes.items() if v > 1)
        raise ConfigError(f"a mesh of {asked} needs {need} devices, {len(have)} are here")
    grid = np.array(have[:need], dtype=object).reshape(list(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def logical_axes(path: Sequence[str]) -> tuple[str, ...]:
    """Logical axes of the parameter at `path`; () means replicated."""
    name = ".".join(str(p) for p in path)
    return next((axes for pattern, axes in _PARAMETERS if re.search(rf"(^|\.){pattern}$", name)), ())


def param_sharding(
    path: Sequence[str], shape: Sequence[int], mesh: Mesh, config: TargetConfig | DraftConfig | None = None
) -> NamedSharding:
    """Where a parameter of `shape` lies on `mesh`. With the model's `config`, heads are kept whole."""
    axes, name = logical_axes(path), ".".join(str(p) for p in path)
    field = next((field for pattern, field in _HEADS if re.search(pattern, name)), "")
    heads = getattr(config, field, None) if field else None
    sizes = [heads if heads and axis == "heads" else size for axis, size in zip(axes, shape, strict=False)]
    return axes_sharding(axes, sizes, mesh)


def axes_sharding(axes: Sequence[str], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """A sharding by logical axes; those whose size the mesh axis does not divide are replicated."""

    def place(axis: str, size: int) -> str | None:
        name = MESH_AXES[axis]
        return name if name is not None and size % mesh.shape[name] == 0 else None

    return NamedSharding(mesh, PartitionSpec(*(place(a, n) for a, n in zip(axes, shape, strict=False))))
