"""The root of the command: help with examples, sentences instead of tracebacks, exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline import __version__
from paceline.commands import main as root
from paceline.errors import ConfigError

BUILTIN = ("bench", "demo", "docs", "doctor", "models", "profile", "tables")


def every_command() -> Iterator[tuple[str, ...]]:
    """Paths of all subcommands of the installed command, programs included."""

    def walk(command: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, (*path, name))

    return walk(typer.main.get_command(root.build()), ())


def raising(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def run() -> None:
        raise error

    return app


@pytest.mark.parametrize("path", list(every_command()), ids=" ".join)
def test_every_help_has_an_example(path: tuple[str, ...]) -> None:
    for option in ("--help", "-h"):
        result = CliRunner().invoke(root.build(), [*path, option])
        assert result.exit_code == 0
        assert f"Example: paceline {' '.join(path)}".strip() in " ".join(result.output.split())


def test_all_commands_of_the_design_are_there() -> None:
    paths = set(every_command())
    for command in ("demo", "serve", "agent", "chat", "doctor", "bench"):
        assert (command,) in paths
    for group, commands in {"docs": ("add", "list", "search", "remove"), "devices": ("add", "list", "revoke")}.items():
        assert {(group, command) for command in commands} <= paths


def test_version_is_printed() -> None:
    result = CliRunner().invoke(root.build(), ["--version"])
    assert (result.exit_code, result.output) == (0, f"paceline {__version__}\n")


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"paceline {__version__}\n"


def test_an_error_raised_on_purpose_is_one_sentence_and_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(root, "build", lambda: raising(ConfigError("port = 'x' cannot be used")))
    monkeypatch.setattr(sys, "argv", ["paceline"])
    with pytest.raises(SystemExit) as end:
        root.main()
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "paceline: port = 'x' cannot be used\n")


def test_control_c_ends_quietly_with_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(root, "build", lambda: raising(KeyboardInterrupt()))
    monkeypatch.setattr(sys, "argv", ["paceline"])
    with pytest.raises(SystemExit) as end:
        root.main()
    assert end.value.code == 130
    assert "".join(capsys.readouterr()) == ""


def test_a_checkout_that_is_not_installed_says_so_and_keeps_its_own_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = root.build(programs=())
    assert "pip install -e ." in capsys.readouterr().err
    names = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group: it has commands
    assert tuple(sorted(names)) == BUILTIN


def test_a_program_that_is_missing_is_named_and_the_rest_works(capsys: pytest.CaptureFixture[str]) -> None:
    missing = EntryPoint("elsewhere", "paceline.elsewhere.commands:register", root.GROUP)
    app = root.build(programs=(missing,))
    assert "the commands of elsewhere are missing here" in capsys.readouterr().err
    assert CliRunner().invoke(app, ["docs", "--help"]).exit_code == 0


def test_a_program_whose_dependency_is_missing_is_not_taken_for_missing_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        root.build(programs=(EntryPoint("needy", "needy:register", root.GROUP),))
