"""Flags made from a settings class: one per field; a missing flag is left to the other sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.commands.options import options
from paceline.errors import ConfigError
from paceline.settings import SCHEMAS, AgentSettings, NodeSettings
from paceline.settings_sources import Origins, describe, paths


def app_of(schema: type[NodeSettings]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command()
    @options(schema)
    def run(settings: NodeSettings, origins: Origins) -> None:
        """Show them."""
        for line in describe(settings, origins):
            typer.echo(line)

    return app


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_help_shows_what_people_choose_with_its_variable_and_nothing_of_the_tables(schema: type[NodeSettings]) -> None:
    shown = " ".join(CliRunner().invoke(app_of(schema), ["--help"], terminal_width=400).output.split())
    assert "typing" not in shown and "<str>" in shown, "types are told by their names"
    for path in paths(schema):
        assert (f"--{path.replace('_', '-')} " in shown) == ("." not in path)
        assert (f"[PACELINE_{path.upper()}]" in shown) == ("." not in path)
    assert "Show them." in shown
    assert "--config" in shown


@pytest.mark.parametrize("flag", ["--step-rows", "--energy-meter", "--no-such"])
def test_a_flag_of_a_setting_in_a_table_is_answered_with_where_that_is(flag: str) -> None:
    result = CliRunner().invoke(app_of(AgentSettings), [flag, "1"])
    assert (flag == "--no-such") == ("No such option" in result.output)
    assert isinstance(result.exception, SystemExit) or f"{flag} is now" in str(result.exception)


def test_settings_can_be_shown_in_place_of_a_start() -> None:
    app = typer.Typer(rich_markup_mode=None)
    started: list[NodeSettings] = []

    @app.command()
    @options(AgentSettings)
    def run(settings: NodeSettings, origins: Origins) -> None:  # noqa: ARG001  # the signature of a program
        started.append(settings)

    result = CliRunner().invoke(app, ["--port", "9", "--code", "K7QF", "--show-settings"])
    assert (result.exit_code, started) == (0, [])
    assert "= 9  (flag --port)" in result.output and "K7QF" not in result.output
    assert len(result.output.splitlines()) == len(paths(AgentSettings))
    CliRunner().invoke(app, ["--port", "9"])
    assert [settings.port for settings in started] == [9]


def test_flags_of_every_kind_arrive_with_their_origin(tmp_path: Path) -> None:
    arguments = ["--port", "9", "--api-keys", "a", "--api-keys", "b,c", "--insecure", "--dtype", "float16"]
    arguments += ["--state-dir", str(tmp_path / "state")]
    lines = CliRunner().invoke(app_of(AgentSettings), arguments).output.splitlines()
    shown = {line.split()[0]: line.split("= ", 1)[1] for line in lines}
    assert shown["port"] == "9  (flag --port)"
    assert shown["api_keys"] == "(3 set)  (flag --api-keys)"
    assert shown["insecure"] == "True  (flag --insecure)"
    assert shown["dtype"] == "float16  (flag --dtype)"
    assert shown["state_dir"] == f"{tmp_path}/state  (flag --state-dir)"
    assert shown["tuning.backend"] == "auto  (default)"


def test_a_flag_can_say_no_to_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_INSECURE", "true")
    shown = CliRunner().invoke(app_of(AgentSettings), ["--no-insecure"]).output
    assert "False  (flag --insecure)" in shown


def test_what_cannot_be_used_is_an_error_before_anything_runs() -> None:
    assert "is not one of" in CliRunner().invoke(app_of(AgentSettings), ["--dtype", "int4"]).output
    result = CliRunner().invoke(app_of(AgentSettings), ["--cloud", "nowhere"])
    assert isinstance(result.exception, ConfigError)
