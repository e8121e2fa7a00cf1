"""A mapping, as YAML gives it, into frozen dataclasses: every key known, every value of its field's type."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from eagle3_jax.errors import UserError


class RecipeError(UserError):
    """A recipe that cannot be followed; the message names the key."""


def build(cls: type, table: Any, where: str) -> Any:
    """A frozen dataclass of a mapping, field by field."""
    if not isinstance(table, Mapping):
        raise RecipeError(f"{where.rstrip('.')}: expected keys and values, got {table!r}")
    hints = typing.get_type_hints(cls)
    if unknown := [str(key) for key in table if key not in hints]:
        raise RecipeError(_unknown(unknown[0], hints, where))
    return cls(**{key: _convert(value, hints[key], where + key) for key, value in table.items()})


def _unknown(key: str, known: Iterable[str], where: str) -> str:
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1)
    advice = f"did you mean {where}{near[0]}?" if near else f"known here are {', '.join(known)}"
    return f"unknown recipe key {where}{key}: {advice}"


def _convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as `kind`, one of: a dataclass, Literal, X | None, tuple[X, ...], dict, or a plain type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value or {}, where + ".")
    if origin in (types.UnionType, typing.Union):
        (inner,) = (a for a in arguments if a is not type(None))
        return None if value is None else _convert(value, inner, where)
    if origin is Literal:
        if value not in arguments:
            raise RecipeError(f"{where}={value!r} is not one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        return _checked(value, dict, where)
    return _number(value, where) if kind is float else _checked(value, kind, where)


def _number(value: Any, where: str) -> float:
    """YAML 1.1 reads 1e-4, without a point, as text."""
    try:
        return float(_checked(value, (int, float, str), where))
    except ValueError:
        raise RecipeError(f"{where}={value!r} is not a number") from None


def _checked(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = kind.__name__ if isinstance(kind, type) else "number"
        raise RecipeError(f"{where}={value!r} is not of type {name}")
    return value
