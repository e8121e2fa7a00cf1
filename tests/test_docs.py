"""The documents speak of what is there: links, files, commands and their flags, names, keywords, recipe keys.

Each check takes a page and returns what is wrong with it, so that pages with planted faults can show that it works.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from eagle3_jax import cli
from eagle3_jax.errors import UserError
from infer.options import Options, check_speculative_config
from infer.params import SamplingParams
from train.data import cli as data_cli
from train.recipe import flatten, load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"\b(?:eagle3_jax|infer|train|pallas_kernels)(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"(?:examples|tests|docs|benchmarks|eagle3_jax|infer|train|pallas_kernels)/[\w./-]*")
DATA_COMMANDS = [f"data {command}" for command in data_cli.COMMANDS]
OPERATORS = {"|", "||", "&&", ";", "&"}
MINIMAL = {"target": "target", "output": "run", "data": {"files": ["answers.jsonl"]}}


@dataclasses.dataclass(frozen=True)
class Page:
    """A page taken apart: prose without its code blocks, code blocks by language, and code spans of the prose."""

    path: Path
    text: str

    @property
    def prose(self) -> str:
        return FENCE.sub("", self.text)

    @property
    def spans(self) -> list[str]:
        return [" ".join(span.split()) for span in SPAN.findall(self.prose)]

    def blocks(self, language: str) -> list[str]:
        return [code for found, code in FENCE.findall(self.text) if found == language]


# ------------------------------------------------------------------------------------------ links and files


def wrong_links(page: Page) -> Iterator[str]:
    """Relative links that lead nowhere."""
    for target in LINK.findall(page.prose):
        relative = target.partition("#")[0]
        if relative and "://" not in target and not (page.path.parent / relative).exists():
            yield f"link to {target}"


def wrong_files(page: Page) -> Iterator[str]:
    """Files of the repository that are named and are not there."""
    for span in page.spans:
        if FILE.fullmatch(span) and not (ROOT / span).exists():
            yield f"no file {span}"


# ------------------------------------------------------------------------------------------------- commands


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Of a command, or of one of `eagle3 data`."""
    parser = _Parser(prog=f"eagle3 {command}", allow_abbrev=False)
    name, _, inner = command.partition(" ")
    cli.add_command_arguments(data_cli.COMMANDS[inner] if inner else cli.COMMANDS[name], parser)
    return parser


def flags_of(command: str) -> set[str]:
    return set(parser_of(command)._option_string_actions)


def commands_in(line: str) -> Iterator[list[str]]:
    """The simple commands of a shell line, redirections and leading VARIABLE=value left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in OPERATORS:
            words.append(word)
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words
        words = []


def shell_lines(page: Page) -> Iterator[str]:
    for block in page.blocks("sh"):
        yield from block.replace("\\\n", " ").splitlines()


def wrong_commands(page: Page) -> Iterator[str]:
    """Subcommands and flags that do not exist. What stands in a code block must be accepted whole."""
    for line in shell_lines(page):
        for words in commands_in(line):
            yield from _command_problems(words, whole=True)
            yield from _script_problems(words)
    for span in page.spans:
        if re.search(r"\beagle3 [a-z-]", span):
            for words in commands_in(span):
                yield from _command_problems(words, whole=False)
        elif span.startswith("--"):
            flag = span.split()[0]
            if not any(flag in flags_of(command) for command in (*cli.COMMANDS, *DATA_COMMANDS)):
                yield f"no subcommand has {flag}"


def _command_problems(words: list[str], *, whole: bool) -> Iterator[str]:
    if words[0] != "eagle3" or len(words) < 2:
        return
    name, rest = words[1], words[2:]
    if name.startswith("-"):
        if name not in cli._top_parser()._option_string_actions:
            yield f"eagle3 has no {name}"
    elif name == "data" and rest and f"data {rest[0]}" not in DATA_COMMANDS:
        yield f"no subcommand data {rest[0]}"
    elif name == "data" and rest:
        yield from _flag_problems(f"data {rest[0]}", words, rest[1:], whole=whole)
    elif name not in cli.COMMANDS:
        yield f"no subcommand {name}"
    else:
        yield from _flag_problems(name, words, rest, whole=whole)
    if name == "train":
        yield from recipe_problems(MINIMAL, [word for word in rest if re.match(r"[a-z_.]+=", word)])


def _flag_problems(name: str, words: list[str], rest: list[str], *, whole: bool) -> Iterator[str]:
    if whole:
        try:
            parser_of(name).parse_args(rest)
        except ValueError as error:
            yield f"{' '.join(words)}: {error}"
    else:
        flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
        yield from (f"eagle3 {name} has no {flag}" for flag in sorted(flags - flags_of(name)))


def _script_problems(words: list[str]) -> Iterator[str]:
    """Scripts of the repository: they exist, and know the flags they are given."""
    if words[0] != "python" or not words[1].endswith(".py"):
        return
    script = ROOT / words[1]
    if not script.is_file():
        yield f"no script {words[1]}"
        return
    source = script.read_text(encoding="utf-8")
    yield from (f"{words[1]} has no {w}" for w in words if w.startswith("--") and f'"{w}"' not in source)


# ---------------------------------------------------------------------------------------------------- names


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one (a field of a dataclass counts)."""
    parts, found = name.split("."), None
    for depth in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[depth:]:
        if part in getattr(found, "__dataclass_fields__", {}):
            return True
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return found is not None


def wrong_names(page: Page) -> Iterator[str]:
    """Dotted names of ours, in code spans and in the imports of Python blocks, that cannot be imported."""
    names = [name for span in page.spans for name in NAME.findall(span)]
    for block in page.blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
    yield from (f"cannot import {name}" for name in names if NAME.fullmatch(name) and not resolves(name))


def wrong_keywords(page: Page) -> Iterator[str]:
    """Keywords of LLM and SamplingParams in Python blocks that these would refuse."""
    known = {
        "LLM": {field.name for field in dataclasses.fields(Options)} | {"model"},
        "LLM.from_models": {field.name for field in dataclasses.fields(Options)}
        | {"stop_ids", "generation_config", "drafter"},
        "SamplingParams": {field.name for field in dataclasses.fields(SamplingParams)},
    }
    calls = [node for b in page.blocks("python") for node in ast.walk(ast.parse(b)) if isinstance(node, ast.Call)]
    for call in calls:
        name = ast.unparse(call.func)
        for keyword in call.keywords if name in known else ():
            if keyword.arg is not None and keyword.arg not in known[name]:
                yield f"{name} has no keyword {keyword.arg}"
            if keyword.arg == "speculative_config":
                yield from _speculative_problems(keyword.value)


def _speculative_problems(value: ast.expr) -> Iterator[str]:
    try:
        check_speculative_config(ast.literal_eval(value), default_model=Path("head"))
    except UserError as error:
        yield str(error)


# -------------------------------------------------------------------------------------------------- recipes


def merged(table: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: merged(table[k], v) if isinstance(table.get(k), dict) else v for k, v in more.items()}
    return {**table, **both}


def recipe_of(table: Mapping[str, Any], tmp_path: Path, overrides: list[str] | None = None) -> Any:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(dict(table)), encoding="utf-8")
    return load_recipe(file, overrides or [])


def recipe_problems(table: Mapping[str, Any], overrides: list[str] | None = None) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            recipe_of(table, Path(folder), overrides)
        except UserError as error:
            yield str(error)


def wrong_recipes(page: Page) -> Iterator[str]:
    """Recipes, whole or in part, with keys or values that the schema refuses."""
    for block in page.blocks("yaml"):
        yield from recipe_problems(merged(MINIMAL, yaml.safe_load(block)))


def keys_of(table: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict) and key != "template_kwargs":
            yield from keys_of(value, f"{where}{key}.")
        else:
            yield where + key


# ---------------------------------------------------------------------------------------------------- tests

CHECKS: list[Callable[[Page], Iterator[str]]] = [
    wrong_links, wrong_files, wrong_commands, wrong_names, wrong_keywords, wrong_recipes,
]  # fmt: skip


def read(path: Path) -> Page:
    return Page(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_a_page_speaks_of_is_there(path: Path) -> None:
    page = read(path)
    problems = [problem for check in CHECKS for problem in check(page)]
    assert not problems, "\n".join(problems)


def test_every_recipe_key_is_shown_with_its_default(tmp_path: Path) -> None:
    shown = [yaml.safe_load(block) for block in read(ROOT / "docs" / "train.md").blocks("yaml")]
    whole = max(shown, key=lambda table: len(list(keys_of(table))))
    defaults = flatten(recipe_of(MINIMAL, tmp_path))
    assert set(keys_of(whole)) == set(defaults)
    assert flatten(recipe_of(whole, tmp_path)) == defaults


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[page](nowhere.md)", "link to nowhere.md"),
        ("[page](README.md) and `tests/test_nothing.py`", "no file tests/test_nothing.py"),
        ("`eagle3 serve`", "no subcommand serve"),
        ("`eagle3 generate --drafts 3`", "eagle3 generate has no --drafts"),
        ("`eagle3 --nothing`", "eagle3 has no --nothing"),
        ("give `--drafts 3`", "no subcommand has --drafts"),
        ("```sh\necho x | eagle3 generate --k three\n```", "eagle3 generate --k three: argument --k: invalid"),
        ("```sh\nA=1 eagle3 inspect\n```", "eagle3 inspect: the following arguments are required: folder"),
        ("```sh\neagle3 train a.yaml optimizer.rate=1\n```", "unknown recipe key optimizer.rate"),
        ("```sh\npython examples/nothing.py\n```", "no script examples/nothing.py"),
        ("```sh\npython examples/tiny_model/pretrain.py a --cold 1\n```", "pretrain.py has no --cold"),
        ("```sh\neagle3 data regenerate a --target t --output o --cold 1\n```", "unrecognized arguments: --cold"),
        ("`eagle3 data regenerate --cold`", "eagle3 data regenerate has no --cold"),
        ("`eagle3 data collect`", "no subcommand data collect"),
        ("`infer.llm.LMM`", "cannot import infer.llm.LMM"),
        ("`pallas_kernels.nothing`", "cannot import pallas_kernels.nothing"),
        ("```python\nfrom eagle3_jax import LMM\n```", "cannot import eagle3_jax.LMM"),
        ("```python\nLLM(model='x', tensor_parallel=2)\n```", "LLM has no keyword tensor_parallel"),
        ("```python\nLLM(speculative_config={'k': 3})\n```", "speculative_config: unknown keyword 'k'"),
        ("```yaml\ndraft: {layers: 1}\n```", "unknown recipe key draft.layers"),
    ],
)
def test_a_planted_fault_is_found(text: str, problem: str) -> None:
    page = Page(ROOT / "README.md", text)
    (found,) = [found for check in CHECKS for found in check(page)]
    assert problem in found


@pytest.mark.parametrize("name", ["infer.LLM", "infer.cycle.DecodeState.codes", "eagle3_jax.cache.Cache.commit"])
def test_names_that_resolve(name: str) -> None:
    assert resolves(name)
