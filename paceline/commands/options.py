"""Command-line options: shared ones, and those generated from the fields of a settings class.

    @app.command(epilog="Example: paceline serve --model fake")
    @options(ServerSettings)
    def serve(settings: ServerSettings, origins: Origins) -> None: ...

Every option is optional for the parser: a missing value comes from the environment, the file or the default.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar, get_origin

import typer
from pydantic.fields import FieldInfo

from paceline.settings import PREFIX, ProgramSettings
from paceline.settings_sources import Origins, field_default, resolve

Settings = TypeVar("Settings", bound=ProgramSettings)
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings; default: paceline.toml")]
Json = Annotated[bool, typer.Option("--json", help="write JSON to standard output")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", help="default: that of the side's settings")]

CONFIG_HELP = "TOML file with settings; default: paceline.toml in the working directory, if there is one"


def options(cls: type[Settings]) -> Callable[[Callable[[Settings, Origins], None]], Callable[..., None]]:
    """Decorate a function of (settings, origins) into one whose parameters are the fields of `cls` and --config."""

    def decorate(function: Callable[[Settings, Origins], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*, config: Path | None, **flags: object) -> None:
            settings, origins = resolve(cls, flags, os.environ, config)
            function(settings, origins)

        parameters = [_parameter(key, info) for key, info in cls.model_fields.items()]
        parameters.append(_optional("config", Path, typer.Option("--config", help=CONFIG_HELP, show_default=False)))
        _disguise(command, {parameter.name: parameter for parameter in parameters})
        return command

    return decorate


def _parameter(key: str, info: FieldInfo) -> inspect.Parameter:
    flag = key.replace("_", "-")
    several = get_origin(info.annotation) is tuple
    default = field_default(key, info)
    option = typer.Option(
        f"--{flag}/--no-{flag}" if info.annotation is bool else f"--{flag}",
        help=f"{info.description}{f'; default: {default}' if default else ''} [{PREFIX}{key.upper()}]",
        metavar="<str>,..." if several else None,
        show_default=False,
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
