"""Options of all commands: one spelling for one meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from paceline.commands.main import build

Command = Any  # click's, which typer brings

LONG_RUNNING = {"serve", "agent", "stage", "demo"}  # they print a log, no result
WITHOUT_JSON = LONG_RUNNING | {"mcp", "setup", "join"}  # a protocol of its own; files are the result
OF_A_STATE = ("devices", "keys", "docs", "tables", "serve", "agent")
SAID_OTHERWISE = {"--state", "--state-directory", "--dir", "--output-json"}


def commands() -> Iterator[tuple[str, Command]]:
    def walk(name: str, command: Command) -> Iterator[tuple[str, Command]]:
        subcommands = getattr(command, "commands", None)
        if subcommands is None:
            yield name, command
        for each, found in (subcommands or {}).items():
            yield from walk(f"{name} {each}".strip(), found)

    yield from walk("", typer.main.get_command(build()))


ALL = dict(commands())


def options(command: Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_there_are_commands() -> None:
    assert {"chat", "status", "docs add", "devices activity", "keys revoke", "tables warm"} <= set(ALL)


def test_every_command_with_a_result_writes_it_as_json() -> None:
    for name, command in ALL.items():
        assert ("--json" in options(command)) == (name not in WITHOUT_JSON), name


def test_state_dir_works_wherever_a_state_is_meant_and_nothing_has_two_names() -> None:
    for name, command in ALL.items():
        given = options(command)
        assert not given & SAID_OTHERWISE, name
        assert not name.startswith(OF_A_STATE) or given >= {"--state-dir", "--config"}, name
