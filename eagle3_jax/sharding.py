"""The one table from what an axis means to where it lies.

Parameters are told apart by the end of their path, caches by their fields; each gets logical axes, and `MESH_AXES` maps
those to the mesh. An axis that does not divide (key/value heads fewer than the tensor axis, say) is replicated. Meshes
are Auto: XLA carries the layout through the program. "pjit" today is `jax.jit` with shardings.

Rows of a training batch are spread over `data` and `fsdp`, slots of generation over `data` alone: a training step
gathers a matrix that `fsdp` has cut, since its tokens outweigh it; a decoding step multiplies with the part it holds
and sums, since a few tokens weigh nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.cache import Cache, DeltaState, KVPages
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.errors import ConfigError
from pallas_kernels import dispatch

AXES = ("data", "fsdp", "expert", "tensor")

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "slots": "data",
    "all slots": ("data", "tensor"),
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
    (r"experts\.(gate|up)_proj", ("expert", "embed", "mlp")),
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

_CACHES: dict[str, dict[str, tuple[str, ...]]] = {
    # A slot's pages lie together in the pools, so that pages are spread as slots are.
    "KVPages": {name: ("heads", "slots", "replicated", "replicated") for name in ("keys", "values")},
    "DeltaState": {
        "state": ("slots", "heads", "replicated", "replicated"),
        "keys": ("slots", "replicated", "heads", "replicated"),
        "updates": ("slots", "replicated", "heads", "replicated"),
        "log_decay": ("slots", "replicated", "heads"),
        "inputs": ("slots", "replicated", "heads"),
    },
}


def make_mesh(
    *, data: int = 1, fsdp: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of axes data, fsdp, expert, tensor over the first devices; neighbours on `tensor` are close together.

    Raises:
      ConfigError: fewer devices than the axes ask for.
    """
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    have = list(jax.devices() if devices is None else devices)
    need = math.prod(sizes.values())
    if need > len(have):
        asked = ", ".join(f"{k}={v}" for k, v in sizes.items() if v > 1)
        raise ConfigError(f"a mesh of {asked} needs {need} devices, {len(have)} are here")
    return Mesh(_grid(have[:need], tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _grid(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Devices by axis. On a TPU slice axes are laid along its links; elsewhere, or where that cannot be, in order."""
    if devices[0].platform == "tpu":
        with contextlib.suppress(NotImplementedError, ValueError, AssertionError):
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices, dtype=object).reshape(shape)


def logical_axes(path: Sequence[str]) -> tuple[str, ...]:
    """Logical axes of the parameter at `path`; () means replicated."""
    return _axes_of(".".join(str(p) for p in path))


@functools.cache
def _axes_of(name: str) -> tuple[str, ...]:
    matrix = name.removesuffix("_scale")  # of a quantised matrix: cut as it is, blocks as the inputs they scale
    return next((axes for pattern, axes in _PARAMETERS if re.search(rf"(^|\.){pattern}$", matrix)), ())


@functools.cache
def _heads_field(name: str) -> str:
    return next((field for pattern, field in _HEADS if re.search(pattern, name)), "")


def param_sharding(
    path: Sequence[str], shape: Sequence[int], mesh: Mesh, config: TargetConfig | DraftConfig | None = None
) -> NamedSharding:
    """Where a parameter of `shape` lies on `mesh`. With the model's `config`, heads are kept whole."""
    axes, field = logical_axes(path), _heads_field(".".join(str(p) for p in path))
    heads = getattr(config, field, None) if field else None
    pieces = [math.gcd(heads, n) if heads and axis == "heads" else n for axis, n in zip(axes, shape, strict=False)]
    return axes_sharding(axes, pieces, mesh)


def model_shardings(state: Any, mesh: Mesh, config: TargetConfig | DraftConfig) -> Any:
    """A sharding for every array of a model's nnx state, as a tree of the same shape."""

    def place(path: tuple[Any, ...], x: Any) -> NamedSharding:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        return param_sharding([name for name in names if name != "value"], x.shape, mesh, config)

    return jax.tree_util.tree_map_with_path(place, state)


def slots_over_tensor(heads: int, slots: int, mesh: Mesh) -> bool:
    """Whether keys and values are spread by slots over the tensor axis, because their heads are too few for it.

    Each device then attends for some slots with all heads. Where slots are too few as well, all is on every device.
    """
    return heads % mesh.shape["tensor"] != 0 and slots % (mesh.shape["data"] * mesh.shape["tensor"]) == 0


def _over_slots(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple({"heads": "replicated", "slots": "all slots"}.get(axis, axis) for axis in axes)


def cache_shardings(cache: Cache, mesh: Mesh) -> Cache:
    """A sharding for every array of a cache; what belongs to no layer is small and replicated."""
    slots = len(cache.lengths)

    def layer(x: KVPages | DeltaState) -> Any:
        fields = _CACHES[type(x).__name__]
        if isinstance(x, KVPages) and slots_over_tensor(len(x.keys), slots, mesh):
            fields = {name: _over_slots(axes) for name, axes in fields.items()}
        return x.replace(**{name: place(axes, shape_of(x, name)) for name, axes in fields.items()})

    def shape_of(x: KVPages | DeltaState, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = getattr(x, name).shape
        # Columns of the convolution lie as those of the projection that they come from, by key heads.
        return (*shape[:2], x.keys.shape[2]) if name == "inputs" else shape

    def place(axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        sizes = [slots if axis.endswith("slots") else size for axis, size in zip(axes, shape, strict=True)]
        return axes_sharding(axes, sizes, mesh)

    whole = jax.tree.map(lambda _: replicated(mesh), cache)
    return dataclasses.replace(whole, layers=tuple(layer(x) for x in cache.layers))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a program is traced for: its mesh, and the logical axis of its rows ("batch" or "slots")."""

    mesh: Mesh
    rows: str

    def row_axes(self, count: int) -> tuple[str, ...]:
        """The mesh axes over which `count` rows are spread, () if they do not divide."""
        (place,) = axes_sharding([self.rows], [count], self.mesh).spec or (None,)
        return (place,) if isinstance(place, str) else place or ()

    def product_spec(self, axes: Sequence[str], shape: Sequence[int], rows: Sequence[str]) -> PartitionSpec:
        """How a matrix lies when it is multiplied with `rows` of such axes: whole along these, else as it is held."""
        held = axes_sharding(axes, shape, self.mesh).spec
        return PartitionSpec(*(None if axis in rows or axis and self.mesh.shape[axis] == 1 else axis for axis in held))


_LAYOUT: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


@contextlib.contextmanager
def laid_out(mesh: Mesh | None, rows: str) -> Iterator[None]:
    """A context to trace under: layers that spread their work themselves, and `pin_cache`, ask here for the mesh."""
    token = _LAYOUT.set(None if mesh is None else Layout(mesh, rows))
    try:
        with contextlib.nullcontext() if mesh is None or mesh.size == 1 else dispatch.spread():
            yield
    finally:
        _LAYOUT.reset(token)


def current_layout() -> Layout | None:
    """The layout of `laid_out`, None outside and on one device."""
    return _LAYOUT.get()


def pin(x: Array, *axes: str) -> Array:
    """`x`, held to logical axes under a layout. What XLA would choose by itself depends on all that surrounds it."""
    layout = current_layout()
    return x if layout is None else jax.lax.with_sharding_constraint(x, axes_sharding(axes, x.shape, layout.mesh))


def pin_rows(x: Array) -> Array:
    """x [B,T,D], whole on every device that has its rows: what a layer starts from, whatever it does inside."""
    layout = current_layout()
    return x if layout is None else pin(x, layout.rows, "replicated", "replicated")


def attention_axes(heads: int, slots: int) -> tuple[str, str]:
    """Logical axes of slots and of heads in an attention over cached keys: as the cache lies."""
    layout = current_layout()
    if layout is None or slots % layout.mesh.shape["data"]:
        return "replicated", "heads"
    return ("all slots", "replicated") if slots_over_tensor(heads, slots, layout.mesh) else ("slots", "heads")


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def axes_sharding(axes: Sequence[str], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """A sharding by logical axes; those whose size the mesh axis does not divide are replicated."""

    def place(axis: str, size: int) -> str | tuple[str, ...] | None:
        return MESH_AXES[axis] if size % parts(axis, mesh) == 0 else None

    return NamedSharding(mesh, PartitionSpec(*(place(a, n) for a, n in zip(axes, shape, strict=False))))


def parts(axis: str, mesh: Mesh) -> int:
    """Into how many a mesh cuts a logical axis."""
    names = MESH_AXES[axis]
    return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ()))
