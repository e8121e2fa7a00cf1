"""The dispatch of `eagle3`, with a made-up subcommand beside the real table."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from types import ModuleType

import pytest

from eagle3_jax import __version__, cli
from eagle3_jax.errors import UserError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--raise", dest="error", default=None)


def _run(args: argparse.Namespace) -> int | None:
    errors = {"user": UserError("no such folder: /nowhere"), "bug": RuntimeError("a bug"), "stop": KeyboardInterrupt()}
    if args.error:
        raise errors[args.error]
    print(args.word * args.times)
    return None if args.times == 1 else args.times


@pytest.fixture(autouse=True)
def fake_command(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake_command")
    module.__dict__.update(add_arguments=_add_arguments, run=_run)
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "echo", cli.Command("fake_command", "print a word"))


def test_runs_a_subcommand_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "ab", "--times", "3"]) == 3
    assert capsys.readouterr().out == "ababab\n"


def test_no_status_means_success() -> None:
    assert cli.main(["echo", "ab"]) == 0


def test_user_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "ab", "--raise", "user"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: no such folder: /nowhere\n"
    assert captured.out == ""


def test_other_exceptions_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["echo", "ab", "--raise", "bug"])


def test_interrupt_has_the_shells_status() -> None:
    assert cli.main(["echo", "ab", "--raise", "stop"]) == 130


@pytest.mark.parametrize(
    ("name", "advice"),
    [("generat", "did you mean 'generate'?"), ("ecoh", "'echo'"), ("xyzzy", "choose one of generate,")],
)
def test_unknown_command_suggests(name: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 2
    error = capsys.readouterr().err
    assert f"unknown command {name!r}" in error
    assert advice in error


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "print a word" in capsys.readouterr().err


def test_help_of_a_subcommand_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        cli.main(["echo", "--help"])
    assert status.value.code == 0
    out = capsys.readouterr().out
    assert "eagle3 echo" in out
    assert "--times" in out


def test_unknown_option_before_a_command() -> None:
    with pytest.raises(SystemExit) as status:
        cli.main(["--bogus", "echo"])
    assert status.value.code == 2


def test_version_names_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        cli.main(["--version"])
    assert status.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"eagle3-jax {__version__} (jax ")
    assert "flax " in out


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_help_lists_every_command_without_importing_jax() -> None:
    code = (
        "import sys\nfrom eagle3_jax import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit as status: assert status.code == 0\n"
        "assert not {'jax', 'numpy', 'infer', 'train'} & set(sys.modules), 'imported too much'"
    )
    out = _python(code).stdout
    assert all(name in out for name in cli.COMMANDS if name != "echo")


def test_importing_the_package_loads_neither_jax_nor_the_engine() -> None:
    _python("import sys, eagle3_jax; assert not {'jax', 'infer', 'train'} & set(sys.modules)")


def test_public_names_come_from_infer(monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle3_jax

    infer = ModuleType("infer")
    infer.__dict__.update(LLM="the engine", SamplingParams="its parameters")
    monkeypatch.setitem(sys.modules, "infer", infer)
    for name in ("LLM", "SamplingParams"):
        monkeypatch.delitem(eagle3_jax.__dict__, name, raising=False)
    assert (eagle3_jax.LLM, eagle3_jax.SamplingParams) == ("the engine", "its parameters")
    for name in ("LLM", "SamplingParams"):  # do not leave the stand-ins behind
        del eagle3_jax.__dict__[name]
    assert {"LLM", "SamplingParams"} <= set(dir(eagle3_jax))
    with pytest.raises(AttributeError, match="'Missing'"):
        _ = eagle3_jax.Missing


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_describes_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        cli.main([name, "--help"])
    assert status.value.code == 0
    assert cli.COMMANDS[name].help in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("given", [None, "/elsewhere"])
def test_what_is_compiled_is_kept_for_the_next_process(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/cache")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", given or "")
    if given is None:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    cli._keep_what_is_compiled(loaded=())
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == (given or "/a/cache/eagle3-jax")
