"""Where settings come from: flags, `PACELINE_*` variables and a TOML file, resolved once at start-up.

Precedence: flag > environment > file > default. An unknown key is an error that names the nearest known one.
The file (`--config`, or `paceline.toml` in the working directory if others cannot have written it) has keys that all
programs read, and the tables `[server]`, `[agent]` and `[stage]` for one of them. A folder named for several programs
(by a variable, or by a key outside the tables) is split: each side uses its own subfolder, so that the two never share
files.

pydantic-settings is not used: it neither reports where a value came from nor rejects an unknown variable.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from paceline.configuration import grouped
from paceline.core.printable import is_text
from paceline.core.side import SIDES, Side
from paceline.errors import ConfigError
from paceline.secret_files import is_others
from paceline.settings import DERIVED, PREFIX, SCHEMAS, SECRETS, TRUSTING, ProgramSettings, StageSettings

# Folders that are named once for both sides: each side uses its own below it.


FOLDERS: Final[Mapping[str, tuple[str, ...]]] = {  # settings that name one, and files of a side
    "state_dir": ("keys.sqlite", "devices.sqlite", "responses.sqlite", "credentials.json", "docs/documents.sqlite"),
    "docs_dir": ("documents.sqlite",),
}


def own_folder(side: Side, key: str, value: object, origin: str) -> object:
    """This side's subfolder of a folder named for both sides.

    Raises ConfigError if files of a side lie in that folder itself, as one has them that was named for it alone before.
    """
    if not isinstance(value, str):
        return value  # the schema rejects it
    folder = Path(value).expanduser()
    for name in FOLDERS[key]:
        if (folder / name).exists():
            homes = " or ".join(str(folder / each) for each in SIDES)
            raise ConfigError(
                f"{key} = {value!r} ({origin}) is for both sides, each in a folder of its own below it, but "
                f"{folder / name} is there: stop the programs and move what is in {folder} to {homes}, by whose it is."
            )
    return str(folder / side)


DEFAULT_FILE = Path("paceline.toml")

_log = logging.getLogger("paceline.settings")

Origins = Mapping[str, str]  # field name -> where its value came from, in words
Settings = TypeVar("Settings", bound=ProgramSettings)
PROGRAMS: tuple[type[ProgramSettings], ...] = (*SCHEMAS, StageSettings)


def resolve(
    cls: type[Settings], flags: Mapping[str, object], env: Mapping[str, str], file: Path | None = None
) -> tuple[Settings, Origins]:
    """Resolve the settings, and the origin of each field's value.

    `flags` may hold None for flags not given. `file` None: $PACELINE_CONFIG, else `paceline.toml` if there is one.
    Raises ConfigError with a sentence that names the key, its origin and what would be accepted.
    """
    if file is None and env.get(f"{PREFIX}CONFIG"):
        file = Path(env[f"{PREFIX}CONFIG"])
    values: dict[str, object] = {}
    origins = dict.fromkeys(cls.model_fields, "default")
    shared, own = _from_file(cls, file)
    for_both: dict[str, bool] = {}
    sources = ((shared, True), (own, False), (_from_env(cls, env), True), (_from_flags(cls, flags), False))
    for source, is_for_both in sources:  # later ones win
        for key, (value, origin) in source.items():
            values[key], origins[key], for_both[key] = value, origin, is_for_both
    for key in FOLDERS:
        if for_both.get(key):
            values[key] = own_folder(cls.side, key, values[key], origins[key])
    try:
        settings = cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, origins)) from None
    for key in values:
        value = getattr(settings, key)
        if any(
            isinstance(text, str) and not is_text(text) for text in (value if isinstance(value, tuple) else [value])
        ):
            raise ConfigError(f"{key} ({origins[key]}) has bytes that are no UTF-8: write it in that encoding")
    if file is None:
        trusting = [
            (key, getattr(settings, key)) for key in sorted(TRUSTING) if origins.get(key, "").startswith("file ")
        ]
        _tell(
            ", ".join(
                f"{key} = {_shown(key, value)}" for key, value in trusting if value != cls.model_fields[key].default
            )
        )
    return settings, origins


@functools.cache  # once, where a command asks for both programs' settings
def _tell(trusting: str) -> None:
    if trusting:
        _log.warning(
            "%s of this folder sets whom and what this machine trusts: %s. Named with --config, nothing is said of it.",
            DEFAULT_FILE,
            trusting,
        )


def describe(settings: ProgramSettings, origins: Origins) -> list[str]:
    """One line per setting, in the order of their groups: name, value and origin, secrets masked."""
    keys = [key for _, key in grouped(type(settings).model_fields)]
    width = max(map(len, keys))
    return [f"{key:<{width}} = {_shown(key, getattr(settings, key))}  ({origins[key]})" for key in keys]


def describe_given(settings: ProgramSettings, origins: Origins) -> str:
    """What was set by a flag, a variable or the file, in one line for the start of the log; secrets masked."""
    keys = [key for _, key in grouped(type(settings).model_fields) if origins[key] != "default"]
    told = ", ".join(f"{key} = {_shown(key, getattr(settings, key))} ({origins[key]})" for key in keys)
    return f"{told or 'nothing was set'}; --show-settings lists all"


def field_default(key: str, info: FieldInfo) -> str | None:
    """The default as `--help` shows it; None where the description names it."""
    if key in DERIVED or info.default in (None, (), False):
        return None
    return ", ".join(info.default) if isinstance(info.default, tuple) else str(info.default)


def _shown(key: str, value: object) -> str:
    if key in SECRETS and value:
        return f"({len(value)} set)" if isinstance(value, tuple) else "(set)"
    if value is None or value == ():
        return "(none)"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_Source = dict[str, tuple[object, str]]  # field -> (value, origin)


def _from_flags(cls: type[ProgramSettings], flags: Mapping[str, object]) -> _Source:
    _refuse_unknown(flags, set(cls.model_fields), "flag")
    return {
        key: (value, f"flag --{key.replace('_', '-')}") for key, value in flags.items() if value not in (None, [], ())
    }


def _from_env(cls: type[ProgramSettings], env: Mapping[str, str]) -> _Source:
    """Read variables; those of other programs are allowed, since all may share one environment. Empty: not set."""
    ours = {key.removeprefix(PREFIX).lower(): key for key in env if key.startswith(PREFIX)}
    ours.pop("config", None)
    _refuse_unknown(ours, _known(), "environment variable", spelt=lambda key: f"{PREFIX}{key.upper()}")
    return {
        key: (env[name], f"environment {name}") for key, name in ours.items() if key in cls.model_fields and env[name]
    }


def _from_file(cls: type[ProgramSettings], file: Path | None) -> tuple[_Source, _Source]:
    """Read the file: (keys for all programs, keys of this program's table)."""
    path = file or DEFAULT_FILE
    if file is None and not path.is_file():
        return {}, {}
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if file is None:
                _check_own(path, status)
            content = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    own: _Source = {}
    _warn_of_readers(path, status, content)
    tables = {schema.table: content.pop(schema.table, {}) for schema in PROGRAMS}
    _refuse_unknown(content, _known() | set(tables), f"key in {path}")
    shared: _Source = {key: (value, f"file {path}") for key, value in content.items() if key in cls.model_fields}
    for schema in PROGRAMS:
        table = tables[schema.table]
        if not isinstance(table, dict):
            raise ConfigError(f"{schema.table} in {path} must be a table: [{schema.table}]")
        _refuse_unknown(table, set(schema.model_fields), f"key in [{schema.table}] of {path}")
        if schema is cls:
            own = {key: (value, f"file {path} [{schema.table}]") for key, value in table.items()}
    return shared, own


def _check_own(path: Path, status: os.stat_result) -> None:
    """Raises ConfigError for a file that was not named, unless nobody but this user and root can have written it."""
    folders = {path.absolute().parent, path.resolve().parent}  # two where it is a link
    for place, found in ((path.absolute(), status), *((folder, folder.stat()) for folder in folders)):
        if is_others(found):
            raise ConfigError(
                f"{path} of this folder is not read, since another user owns or may write {place}: look into it, and "
                f"name it with --config {path} if you trust it, or start in another folder."
            )


def _warn_of_readers(path: Path, status: os.stat_result, content: Mapping[str, object]) -> None:
    secrets = SECRETS & {key for table in (content, *content.values()) if isinstance(table, dict) for key in table}
    readers = 0o077 if status.st_uid == os.geteuid() else 0o007  # root's file is this user's by its group
    if secrets and stat.S_ISREG(status.st_mode) and status.st_mode & readers:
        _log.warning(
            "%s has %s and can be read by others: run `chmod 600 %s` if they are not to know its secrets",
            path,
            ", ".join(sorted(secrets)),
            path,
        )


def _known() -> set[str]:
    return {key for schema in PROGRAMS for key in schema.model_fields}


def _refuse_unknown(
    keys: Iterable[str], known: set[str], what: str, spelt: Callable[[str], str] = lambda key: key
) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)  # 0: always name one
            raise ConfigError(f"unknown {what} {spelt(key)}: did you mean {spelt(near[0])}?")


def _sentence(error: ValidationError, origins: Origins) -> str:
    """Describe the first validation error that does not follow from another."""
    faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
    fault = faults[0]
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    key = str(fault["loc"][0])
    shown = "(hidden)" if key in SECRETS else repr(fault["input"])
    return f"{key} = {shown} ({origins[key]}) cannot be used: {message[:1].lower()}{message[1:]}"
