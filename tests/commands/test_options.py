"""Flags made from a settings class: one per field; a missing flag is left to the other sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.commands.options import OTHERS, GroupedCommand, options
from paceline.configuration import GROUPS
from paceline.errors import ConfigError
from paceline.settings import SCHEMAS, AgentSettings, NodeSettings
from paceline.settings_sources import PROGRAMS, Origins, describe


def app_of(schema: type[NodeSettings]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command(cls=GroupedCommand)
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
def test_every_field_has_a_flag_that_names_its_variable(schema: type[NodeSettings]) -> None:
    shown = " ".join(CliRunner().invoke(app_of(schema), ["--help"], terminal_width=400).output.split())
    for key in schema.model_fields:
        assert f"--{key.replace('_', '-')} " in shown
        assert f"[PACELINE_{key.upper()}]" in shown
    assert "Show them." in shown
    assert "--config" in shown


def test_every_setting_of_every_program_stands_in_one_group() -> None:
    listed = [key for group in GROUPS.values() for key in group]
    assert sorted(listed) == sorted({key for schema in PROGRAMS for key in schema.model_fields})


@pytest.mark.parametrize("schema", SCHEMAS)
def test_help_shows_the_settings_under_the_titles_of_their_groups(schema: type[NodeSettings]) -> None:
    lines = CliRunner().invoke(app_of(schema), ["--help"], terminal_width=400).output.splitlines()
    shown: dict[str, list[str]] = {}
    for line in lines:
        if line.endswith(":") and line[:1] != " ":
            shown[line[:-1]] = []
        elif line.strip().startswith("--"):
            shown[list(shown)[-1]].append(line.split()[0].removeprefix("--").replace("-", "_"))
    others = shown.pop(OTHERS)
    assert others == ["config", "show_settings", "help"]
    has = {title: [key for key in group if key in schema.model_fields] for title, group in GROUPS.items()}
    assert list(shown.items()) == [(title, keys) for title, keys in has.items() if keys]


def test_settings_can_be_shown_in_place_of_a_start() -> None:
    app = typer.Typer(rich_markup_mode=None)
    started: list[NodeSettings] = []

    @app.command(cls=GroupedCommand)
    @options(AgentSettings)
    def run(settings: NodeSettings, origins: Origins) -> None:  # noqa: ARG001  # the signature of a program
        started.append(settings)

    result = CliRunner().invoke(app, ["--port", "9", "--code", "K7QF", "--show-settings"])
    assert (result.exit_code, started) == (0, [])
    assert "= 9  (flag --port)" in result.output and "K7QF" not in result.output
    assert len(result.output.splitlines()) == len(AgentSettings.model_fields)
    CliRunner().invoke(app, ["--port", "9"])
    assert [settings.port for settings in started] == [9]


def test_flags_of_every_kind_arrive_with_their_origin(tmp_path: Path) -> None:
    arguments = ["--port", "9", "--api-keys", "a", "--api-keys", "b,c", "--insecure", "--backend", "hf"]
    arguments += ["--state-dir", str(tmp_path / "state")]
    lines = CliRunner().invoke(app_of(AgentSettings), arguments).output.splitlines()
    shown = {line.split()[0]: line.split("= ", 1)[1] for line in lines}
    assert shown["port"] == "9  (flag --port)"
    assert shown["api_keys"] == "(3 set)  (flag --api-keys)"
    assert shown["insecure"] == "True  (flag --insecure)"
    assert shown["backend"] == "hf  (flag --backend)"
    assert shown["state_dir"] == f"{tmp_path}/state  (flag --state-dir)"
    assert shown["dtype"] == "auto  (default)"


def test_a_flag_can_say_no_to_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_INSECURE", "true")
    shown = CliRunner().invoke(app_of(AgentSettings), ["--no-insecure"]).output
    assert "False  (flag --insecure)" in shown


def test_a_file_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[agent]\nport = 77")
    shown = CliRunner().invoke(app_of(AgentSettings), ["--config", "mine.toml"]).output
    assert "77  (file mine.toml [agent])" in shown


def test_what_cannot_be_used_is_an_error_before_anything_runs() -> None:
    assert "is not one of" in CliRunner().invoke(app_of(AgentSettings), ["--backend", "vulkan"]).output
    result = CliRunner().invoke(app_of(AgentSettings), ["--cloud", "nowhere"])
    assert isinstance(result.exception, ConfigError)
