"""Command-line options: shared ones, and those generated from the fields of a settings class.

    @app.command(epilog="Example: paceline serve --model fake")
    @options(ServerSettings)
    def serve(settings: ServerSettings, origins: Origins) -> None: ...

Every option is optional for the parser: a missing value comes from the environment, the file or the default. `--help`
shows those that are no part of a table of the file; a flag for one of these is answered with where it stands. Options
that several commands share are fields of a dataclass, see `spread`. Groups of subcommands and checks of `doctor` are
here, too: several programs add to them, and none imports another.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import or_
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from paceline.core.printable import printable_json
from paceline.errors import ConfigError
from paceline.settings import AgentSettings, NodeSettings, ProgramSettings, ServerSettings, variable
from paceline.settings_sources import Origins, describe, field_default, paths, resolve

if TYPE_CHECKING:
    from paceline.postgres import Postgres


# ---- groups of subcommands, and checks of `doctor` ------------------------------------------------------------------
# ok: as it should be. warn: works, with the drawback that the sentence names. fail: something will not work, and the
# sentence says what to do.
Status = Literal["ok", "warn", "fail"]
Found = tuple[Status, str]
NodeChecks = dict[str, Callable[[NodeSettings], Found | None]]
"""By name: a check of the settings of one side; None for settings that it is not about."""


@dataclass(frozen=True, slots=True)
class ProgramContext:
    checks: NodeChecks = field(default_factory=dict)


def doctor_checks(app: typer.Typer) -> NodeChecks:
    """Checks of `paceline doctor` besides its own. An app without that command, of one program alone, keeps them for
    nobody."""
    added = (app.info.context_settings or {}).get("obj", ProgramContext())
    assert isinstance(added, ProgramContext), "nothing else is the object of the root's context"
    return added.checks


def group_of(app: typer.Typer, name: str, help: str, example: str) -> typer.Typer:
    """The group of this name, made now if another program has not made it."""
    for known in app.registered_groups:
        if known.name == name and known.typer_instance is not None:
            return known.typer_instance
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=help, epilog=f"Example: {example}")
    group.callback()(lambda: None)  # a group of one command is a group
    app.add_typer(group, name=name)
    return group


def devices_group(app: typer.Typer) -> typer.Typer:
    """The group `paceline devices`: a server's devices, and at a device what its cloud has asked."""
    told = (
        "At a server: add, list and revoke the devices that may link to it. At a device: show what the cloud's clients "
        "have asked it."
    )
    return group_of(app, "devices", told, "paceline devices add phone")


# ---- options --------------------------------------------------------------------------------------------------------
Settings = TypeVar("Settings", bound=ProgramSettings)


def path(text: str) -> Path:
    """A path that an option was given. Not an empty one, as of a variable that is not set: `Path` makes that the
    working directory."""
    if not text:
        raise typer.BadParameter("it is empty: leave it out for the default, or give . for the working directory.")
    return Path(text)


Config = Annotated[
    Path | None, typer.Option("--config", parser=path, help="TOML file with settings; default: paceline.toml")
]
Json = Annotated[bool, typer.Option("--json", help="write JSON to standard output")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", parser=path, help="default: that of the side's settings")]

SHOW_HELP = (
    "print every setting with its value and where that comes from, those of the file's tables [answers], [energy], "
    "[outside], [policy] and [tuning] too, and do nothing else"
)
CONFIG_HELP = "TOML file with settings; default: paceline.toml in the working directory, if there is one"


def opened_database(settings: NodeSettings) -> Postgres | None:
    """The database that a server's settings name, to be closed; None where they name none. Raises ConfigError."""
    if not isinstance(settings, ServerSettings) or settings.database is None:
        return None
    try:
        from paceline.postgres import Postgres
    except ModuleNotFoundError as error:
        raise ConfigError("A database needs `pip install 'paceline[postgres]'`.") from error
    return Postgres(settings.database)


@dataclass(frozen=True)
class Where:
    """Whose settings a command reads, and from which file."""

    side: Annotated[Literal["cloud", "device"], typer.Option("--side", help="whose state directory is meant")]
    state_dir: StateDir = None
    config: Config = None

    def settings(self, **flags: object) -> NodeSettings:
        """Those of the side's program, as it would resolve them."""
        flags["state_dir"] = self.state_dir
        return resolve(ServerSettings if self.side == "cloud" else AgentSettings, flags, os.environ, self.config)[0]


@dataclass(frozen=True)
class AtServer:
    """The same of a command that only a server has."""

    state_dir: StateDir = None
    config: Config = None

    def settings(self, **flags: object) -> ServerSettings:
        found = Where("cloud", self.state_dir, self.config).settings(**flags)
        assert isinstance(found, ServerSettings)
        return found


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that the fields of each parameter that is a dataclass are options, with the values of the
    parameter's default as theirs."""
    parameters: dict[str, inspect.Parameter] = {}
    parts: dict[str, Any] = {}  # the dataclasses
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if not is_dataclass(parameter.annotation):
            parameters[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        parts[name] = kind = parameter.annotation
        for each, hint in get_type_hints(kind, include_extras=True).items():
            default = getattr(parameter.default, each)
            parameters[each] = inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)

    @functools.wraps(command)
    def whole(**given: object) -> None:
        own = {name: kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for name, kind in parts.items()}
        command(**given, **own)

    _disguise(whole, parameters)
    return whole


def show(value: object, *lines: str, beside: str = "", as_json: bool) -> None:
    """Print what a command found: as JSON, or these lines; on the standard error what is no part of it."""
    if as_json:
        write_json(value)
        return
    for line in lines:
        typer.echo(line)
    if beside:
        typer.echo(beside, err=True)


def write_json(value: object) -> None:
    """To standard output; dataclasses as objects, paths as texts."""
    typer.echo(printable_json(json.dumps(value, indent=2, ensure_ascii=False, default=_plain)))


def _plain(value: Any) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


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

        own = [path for path in paths(cls) if "." not in path]
        parameters = [_parameter(key, cls.model_fields[key]) for key in own]
        parameters += [_elsewhere(key) for key in sorted(_flags_of_tables(cls) - set(own))]
        named = typer.Option("--config", parser=path, help=CONFIG_HELP, show_default=False)
        parameters.append(_optional("config", Path, named))
        shown = typer.Option("--show-settings", help=SHOW_HELP, show_default=False)
        parameters.append(_optional("show_settings", bool, shown))
        _disguise(command, {parameter.name: parameter for parameter in parameters})
        return command

    return decorate


def _flags_of_tables(cls: type[ProgramSettings]) -> set[str]:
    """What one would call flags for the settings of tables, which have none."""
    inside = [path for path in paths(cls) if "." in path]
    return {path.replace(".", "_") for path in inside} | {path.rpartition(".")[2] for path in inside}


def _elsewhere(key: str) -> inspect.Parameter:
    """An option that is not shown and that `resolve` refuses with a sentence."""
    return _optional(key, str, typer.Option(f"--{key.replace('_', '-')}", hidden=True))


def _parameter(key: str, info: FieldInfo) -> inspect.Parameter:
    flag = key.replace("_", "-")
    several = get_origin(info.annotation) is tuple
    default, bare = field_default(key, info), _bare(info.annotation)
    option = typer.Option(
        f"--{flag}/--no-{flag}" if info.annotation is bool else f"--{flag}",
        help=f"{info.description}{f'; default: {default}' if default else ''} [{variable(key)}]",
        metavar="<str>,..." if several else None,
        show_default=False,
        parser=path if Path in (bare, *get_args(bare)) else None,
    )
    return _optional(key, list[str] if several else bare, option)


def _bare(annotation: Any) -> Any:
    """A type without what is checked of its values, which `resolve` does, and which the help would show."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _bare(parts[0])
    return functools.reduce(or_, map(_bare, parts)) if get_origin(annotation) in (Union, UnionType) else annotation


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
