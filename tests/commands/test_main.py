"""The root of the command: help with examples, spelling, sentences instead of tracebacks, exit codes."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline import __version__
from paceline.commands import main as root
from paceline.errors import AT_LIMITS, ConfigError

BUILTIN = ("bench", "docs", "doctor", "models", "policy", "tables")
Command = Any  # click's, which typer brings


def every_command() -> dict[str, Command]:
    """All commands of the installed command, programs included, by their names; the root by none."""

    def walk(name: str, command: Command) -> Iterator[tuple[str, Command]]:
        yield name, command
        for each, child in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {each}".strip(), child)

    return dict(walk("", typer.main.get_command(root.build())))


def raising(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def run() -> None:
        raise error

    return app


def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in every_command().items():
        for flag in ("--help", "-h") if not name else ("--help",):
            with pytest.raises(SystemExit) as ended:
                command.main([flag], prog_name=f"paceline {name}".strip())
            assert ended.value.code == 0
            assert f"Example: paceline {name}".strip() in " ".join(capsys.readouterr().out.split())


LONG_RUNNING = {"serve", "agent", "stage", "demo"}  # they print a log, no result
WITHOUT_JSON = LONG_RUNNING | {"mcp", "setup", "join"}  # a protocol of its own; files are the result
OF_A_STATE = ("devices", "keys", "docs", "tables", "serve", "agent")
SAID_OTHERWISE = {"--state", "--state-directory", "--dir", "--output-json"}


def test_options_of_all_commands_have_one_spelling_for_one_meaning() -> None:
    found = {name: command for name, command in every_command().items() if not hasattr(command, "commands")}
    assert {"chat", "status", "docs add", "devices activity", "keys revoke", "tables warm"} <= set(found)
    for name, command in found.items():
        given = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert ("--json" in given) == (name not in WITHOUT_JSON), f"{name}: what has a result writes it as JSON"
        assert not given & SAID_OTHERWISE, name
        assert not name.startswith(OF_A_STATE) or given >= {"--state-dir", "--config"}, name


SHOWN_BY_HELP = {
    *("typer", "shellingham", "paceline", "server", "device_agent", "client"),
    *("pydantic", "pydantic_core", "annotated_types", "annotated_doc", "typing_extensions", "typing_inspection"),
}
IMPORTED = """
import sys
from paceline.commands.main import main
sys.argv = ["paceline", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
print(*sys.modules)
"""
of_distributions = functools.cache(packages_distributions)


@pytest.mark.parametrize("command", ["serve --help", "docs add --help", "chat --help"])
def test_help_imports_nothing_that_it_does_not_show(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *command.split()], capture_output=True, text=True, check=True
    )
    modules = done.stdout.splitlines()[-1].split()
    packages = {name.split(".")[0] for name in modules} & of_distributions().keys()
    assert "torch" in of_distributions() and "typer" in packages
    assert {name for name in packages if not name.startswith(("__editable__", "_distutils_hack"))} <= SHOWN_BY_HELP
    assert "asyncio" not in modules, "a tenth of a second"
    for layer in ("api", "runtime", "engine", "rag", "wire", "strategies", "bootstrap"):
        assert not [name for name in modules if name.startswith(f"paceline.{layer}")]


def test_version_is_printed() -> None:
    result = CliRunner().invoke(root.build(), ["--version"])
    assert (result.exit_code, result.output) == (0, f"paceline {__version__}\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("port = 'x' cannot be used"), "port = 'x' cannot be used"),
        (OSError(28, "No space left on device", "keys"), "[Errno 28] No space left on device: 'keys'"),
        (ExceptionGroup("tasks", [ExceptionGroup("tasks", [ConfigError("of a task")])]), "of a task"),
        (RuntimeError("can't start new thread"), AT_LIMITS),
    ],
)
def test_an_error_raised_on_purpose_or_by_the_system_is_one_sentence_and_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    monkeypatch.setattr(root, "build", lambda: raising(error))
    monkeypatch.setattr(sys, "argv", ["paceline"])
    with pytest.raises(SystemExit) as end:
        root.main()
    assert end.value.code == 2
    assert capsys.readouterr() == ("", f"paceline: {said}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_output_that_a_full_disk_does_not_take_is_one_sentence_and_code_two() -> None:
    program = [sys.executable, "-c", "from paceline.commands.main import main; main()", "--version"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (2, "paceline: [Errno 28] No space left on device\n")


def test_control_c_ends_quietly_with_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(root, "build", lambda: raising(KeyboardInterrupt()))
    monkeypatch.setattr(sys, "argv", ["paceline"])
    with pytest.raises(SystemExit) as end:
        root.main()
    assert end.value.code == 130
    assert "".join(capsys.readouterr()) == ""


def test_arguments_are_utf8_even_where_the_locale_knows_no_such_letters(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "paceline", "keys", "create", "Büro", "--state-dir", str(tmp_path / "sé"), "--json"]
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run(run, capture_output=True, check=False, env={**os.environ, **plain}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "Büro" and (tmp_path / "sé" / "keys.sqlite").exists()


LOADING = """
import asyncio, threading, typer
from paceline.commands import main as root

app = typer.Typer(pretty_exceptions_enable=False)

@app.command()
def run() -> None:
    async def load() -> None:  # as a program loads its model: on the loop's thread, which waits for another
        print("loading", flush=True)
        threading.Event().wait()

    asyncio.run(load())

root.build = lambda: app
root.main()
"""


def test_control_c_ends_a_program_that_still_loads_its_model() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "loading\n"
        program.send_signal(signal.SIGINT)
        try:
            assert program.wait(60) == 130
        finally:
            program.kill()


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
