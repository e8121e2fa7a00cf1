"""Imports between rooms point one way: pallas_kernels <- eagle3_jax <- {train, infer}.

Every import statement counts, those inside functions and under TYPE_CHECKING too, and so does a literal name given to
`import_module` or `__import__`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Room -> the other rooms it may import. `train` may further import what PUBLIC_INFER names.
ROOMS = {
    "pallas_kernels": frozenset[str](),
    "eagle3_jax": frozenset({"pallas_kernels"}),
    "train": frozenset({"eagle3_jax", "pallas_kernels"}),
    "infer": frozenset({"eagle3_jax", "pallas_kernels"}),
}
PUBLIC_INFER = frozenset({"LLM", "SamplingParams", "RequestOutput", "CompletionOutput"})

# The two files of eagle3_jax that reach upwards, only when called: the lazy re-export and the dispatch of subcommands.
LAZY_UPWARD = {"eagle3_jax/__init__.py": {"infer"}, "eagle3_jax/cli.py": {"infer", "train"}}
# torch is there only with the `test` extra: the parity command asks for it when called, and nothing else does.
LAZY_TORCH = {"eagle3_jax/check.py"}


@dataclass(frozen=True)
class Import:
    """One imported module. `names` are those taken from it; `lazy` if importing the file does not execute it."""

    module: str
    names: tuple[str, ...]
    line: int
    lazy: bool

    @property
    def room(self) -> str:
        return self.module.partition(".")[0]


def imports_of(source: str, path: str) -> Iterator[Import]:
    """Every import in `source`, the text of the file `path` (relative to the root, with forward slashes)."""
    yield from _walk(ast.parse(source, path), path, lazy=False)


def _walk(node: ast.AST, path: str, lazy: bool) -> Iterator[Import]:
    yield from _imports_at(node, path, lazy)
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        yield from _walk_all(node.body, path, lazy=True)
        yield from _walk_all(node.orelse, path, lazy)
    else:
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk_all(ast.iter_child_nodes(node), path, lazy or inside_function)


def _walk_all(nodes: Iterator[ast.AST] | list[ast.stmt], path: str, lazy: bool) -> Iterator[Import]:
    for node in nodes:
        yield from _walk(node, path, lazy)


def _imports_at(node: ast.AST, path: str, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, (), node.lineno, lazy)
    elif isinstance(node, ast.ImportFrom):
        names = tuple(alias.name for alias in node.names)
        yield Import(_absolute(node.module or "", node.level, path), names, node.lineno, lazy)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield Import(first.value, (), node.lineno, lazy)


def _absolute(module: str, level: int, path: str) -> str:
    """The absolute name of a relative import of `level` dots in `path`."""
    if not level:
        return module
    package = path.split("/")[:-level]  # drops the file name, then one package for each further dot
    return ".".join([*package, module] if module else package)


def problem(found: Import, path: str) -> str | None:
    """Why the file `path` may not have this import, or None if it may."""
    room = path.partition("/")[0]
    if found.room == "torch":
        allowed = found.lazy and path in LAZY_TORCH
        return None if allowed else "torch is an extra of the tests, not a dependency"
    if found.room not in ROOMS or found.room == room or found.room in ROOMS.get(room, ROOMS):
        return None
    if found.room in LAZY_UPWARD.get(path, ()):
        return None if found.lazy else "only inside a function: importing this file must stay cheap"
    if (room, found.module) == ("train", "infer"):
        private = set(found.names) - PUBLIC_INFER
        return None if found.names and not private else "only the public names of infer"
    return f"{room} may not import {found.room}"


def violations(source: str, path: str) -> list[str]:
    """One line for each import of `source` that breaks a rule."""
    found = ((item, problem(item, path)) for item in imports_of(source, path))
    return [f"{path}:{item.line}: imports {item.module}: {reason}" for item, reason in found if reason]


def _sources() -> list[Path]:
    return sorted(path for room in (*ROOMS, "examples", "benchmarks") for path in (ROOT / room).rglob("*.py"))


def test_the_repository_keeps_its_arrows() -> None:
    paths = _sources()
    assert {path.relative_to(ROOT).parts[0] for path in paths} >= set(ROOMS)
    found = [line for path in paths for line in violations(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/op/tpu.py", "from eagle3_jax import config"),
        ("pallas_kernels/op/tpu.py", "def f():\n    import eagle3_jax.config"),
        ("pallas_kernels/op/tpu.py", "class A:\n    async def f(self):\n        from train import loss"),
        ("eagle3_jax/target.py", "import numpy, infer.cycle as c"),
        ("eagle3_jax/target.py", "if TYPE_CHECKING:\n    from train.loop import Loop"),
        ("eagle3_jax/target.py", "def f():\n    importlib.import_module('infer')"),
        ("eagle3_jax/target.py", "x = __import__('train.loop')"),
        ("eagle3_jax/cli.py", "from infer import LLM"),
        ("eagle3_jax/__init__.py", "def f():\n    import train"),
        ("infer/llm.py", "def f():\n    from train.loss import loss"),
        ("train/evaluate.py", "import infer"),
        ("train/evaluate.py", "from infer import cycle"),
        ("train/evaluate.py", "from infer import *"),
        ("train/evaluate.py", "from infer.cycle import step"),
        ("train/loop.py", "import torch"),
        ("train/loop.py", "def f():\n    from torch.nn import functional"),
        ("eagle3_jax/check.py", "try:\n    import torch.nn\nexcept ImportError:\n    pass"),
        ("examples/demo.py", "import torch"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    (found,) = violations("import os\n" + source, path)
    assert found.startswith(f"{path}:{source.count(chr(10), 0, source.rfind('import')) + 2}: ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/op/__init__.py", "from . import reference\nfrom .tpu import op\nfrom ..other import thing"),
        ("eagle3_jax/target.py", "from pallas_kernels.op import op\nfrom eagle3_jax import config"),
        ("eagle3_jax/__init__.py", "if TYPE_CHECKING:\n    from infer import LLM"),
        ("eagle3_jax/__init__.py", "def f():\n    return import_module('infer')"),
        ("eagle3_jax/cli.py", "def f():\n    import train.cli, infer.bench_cli"),
        ("eagle3_jax/check.py", "def f():\n    import torch"),
        ("train/evaluate.py", "from infer import LLM, SamplingParams"),
        ("infer/llm.py", "import inference, training, torchless\nfrom eagle3_jax.target import Target"),
        ("examples/demo.py", "from infer.cycle import step\nfrom train.loop import loop"),
    ],
)
def test_what_is_allowed_is_not_reported(path: str, source: str) -> None:
    assert violations(source, path) == []


def test_relative_imports_are_resolved() -> None:
    modules = [i.module for i in imports_of("from . import a\nfrom .b import c\nfrom ... import d", "x/y/z/file.py")]
    assert modules == ["x.y.z", "x.y.z.b", "x"]
