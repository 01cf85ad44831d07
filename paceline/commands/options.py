"""Command-line options: shared ones, and those generated from the fields of a settings class.

    @app.command(epilog="Example: paceline serve --model fake", cls=GroupedCommand)
    @options(ServerSettings)
    def serve(settings: ServerSettings, origins: Origins) -> None: ...

Every option is optional for the parser: a missing value comes from the environment, the file or the default. `--help`
shows them under the titles of `configuration.groups`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from paceline.configuration import grouped
from paceline.settings import PREFIX, ProgramSettings
from paceline.settings_sources import Origins, describe, field_default, resolve

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter  # its own copy of click, which it does not show otherwise

Settings = TypeVar("Settings", bound=ProgramSettings)
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings; default: paceline.toml")]
Json = Annotated[bool, typer.Option("--json", help="write JSON to standard output")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", help="default: that of the side's settings")]

OTHERS = "This command"  # title of the options that are no settings
SHOW_HELP = "print every setting with its value and where that comes from, and do nothing else"
CONFIG_HELP = "TOML file with settings; default: paceline.toml in the working directory, if there is one"


def options(cls: type[Settings]) -> Callable[[Callable[[Settings, Origins], None]], Callable[..., None]]:
    """Decorate a function of (settings, origins) into one whose parameters are the fields of `cls`, --config and
    --show-settings, which prints the settings in place of calling the function."""

    def decorate(function: Callable[[Settings, Origins], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*, config: Path | None, show_settings: bool | None, **flags: object) -> None:
            settings, origins = resolve(cls, flags, os.environ, config)
            if show_settings:
                typer.echo("\n".join(describe(settings, origins)))
                return
            function(settings, origins)

        parameters = [_parameter(key, cls.model_fields[key], title) for title, key in grouped(cls.model_fields)]
        parameters.append(_optional("config", Path, typer.Option("--config", help=CONFIG_HELP, show_default=False)))
        shown = typer.Option("--show-settings", help=SHOW_HELP, show_default=False)
        parameters.append(_optional("show_settings", bool, shown))
        _disguise(command, {parameter.name: parameter for parameter in parameters})
        return command

    return decorate


class GroupedCommand(TyperCommand):
    """Shows its options under titles, each of which stands where its first option does."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or OTHERS, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _parameter(key: str, info: FieldInfo, title: str) -> inspect.Parameter:
    flag = key.replace("_", "-")
    several = get_origin(info.annotation) is tuple
    default = field_default(key, info)
    option = typer.Option(
        f"--{flag}/--no-{flag}" if info.annotation is bool else f"--{flag}",
        help=f"{info.description}{f'; default: {default}' if default else ''} [{PREFIX}{key.upper()}]",
        metavar="<str>,..." if several else None,
        show_default=False,
        rich_help_panel=title,
    )
    return _optional(key, list[str] if several else info.annotation, option)


def _optional(name: str, annotation: object, option: object) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation | None, option],  # type: ignore[operator]  # a run-time type
    )


def _disguise(command: Callable[..., None], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Give the command the signature made from the fields, since typer reads signatures."""
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]  # PEP 362 slot
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    del command.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps; typer would read it
