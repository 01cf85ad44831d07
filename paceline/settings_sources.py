"""Where settings come from: flags, `PACELINE_*` variables and a TOML file, resolved once at start-up.

Precedence: flag > environment > file > default. An unknown key is an error that names the nearest known one.
The file (`--config`, or `paceline.toml` in the working directory if others cannot have written it) has keys that all
programs read, and the tables `[server]`, `[agent]` and `[stage]` for one of them. `[answers]`, `[energy]`,
`[outside]` and `[tuning]` stand in the file or in a program's table (`[server.tuning]`); their settings have variables
(`PACELINE_TUNING_THREADS`) and no flags. Here they are named by paths (`tuning.threads`). A folder named for several
programs (by a variable, or by a key outside the tables) is split: each side uses its own subfolder, so that the two
never share files.

pydantic-settings is not used: it neither reports where a value came from nor rejects an unknown variable.
"""

from __future__ import annotations

import difflib
import errno
import functools
import logging
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from paceline.core.printable import is_text
from paceline.core.side import SIDES, Side
from paceline.errors import ConfigError
from paceline.settings import DERIVED, PREFIX, PROGRAMS, SECRETS, TRUSTING, ProgramSettings, variable
from paceline.settings_tables import Table
from paceline.system import is_others, open_mode, user_id

DEFAULT_FILE = Path("paceline.toml")
_USER: Final = re.compile(r"://[^\s,]*@")  # in a URL, with a password perhaps
FOLDERS: Final[Mapping[str, tuple[str, ...]]] = {  # settings that name one, and files of a side
    "state_dir": ("keys.sqlite", "devices.sqlite", "responses.sqlite", "credentials.json", "docs/documents.sqlite"),
    "docs_dir": ("documents.sqlite",),
}


def own_folder(side: Side, key: str, value: object, origin: str) -> object:
    """This side's subfolder of a folder named for both sides.

    Raises ConfigError if files of a side lie in that folder itself, as one has them that was named for it alone before.
    """
    if not isinstance(value, str) or not value:
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


_log = logging.getLogger("paceline.settings")

Origins = Mapping[str, str]  # path of a setting -> where its value came from, in words
Settings = TypeVar("Settings", bound=ProgramSettings)


def tables_of(cls: type[ProgramSettings]) -> dict[str, type[Table]]:
    """The tables of a program by the names of their fields."""
    kinds = {key: info.annotation for key, info in cls.model_fields.items()}
    return {key: kind for key, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Table)}


@functools.cache
def paths(cls: type[ProgramSettings]) -> tuple[str, ...]:
    """Every setting of a program; those of its tables as TABLE.KEY, at the end."""
    tables = tables_of(cls)
    own = [key for key in cls.model_fields if key not in tables]
    return *own, *(f"{name}.{key}" for name, table in tables.items() for key in table.model_fields)


def value_of(settings: ProgramSettings, path: str) -> object:
    table, _, key = path.rpartition(".")
    return getattr(getattr(settings, table) if table else settings, key)


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
    origins = dict.fromkeys(paths(cls), "default")
    shared, own = _from_file(cls, file)
    for_both: dict[str, bool] = {}
    sources = ((shared, True), (own, False), (_from_env(cls, env), True), (_from_flags(cls, flags), False))
    for source, is_for_both in sources:  # later ones win
        for path, (value, origin) in source.items():
            values[path], origins[path], for_both[path] = value, origin, is_for_both
    for key in FOLDERS:
        if for_both.get(key):
            values[key] = own_folder(cls.side, key, values[key], origins[key])
    nested: dict[str, object] = {name: {} for name in tables_of(cls)}
    for path, value in values.items():
        table, _, key = path.rpartition(".")
        inside = nested[table] if table else nested
        assert isinstance(inside, dict)
        inside[key] = value
    try:
        settings = cls.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(_sentence(error, origins)) from None
    for path in values:
        value = value_of(settings, path)
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and not is_text(text) for text in texts):
            raise ConfigError(f"{path} ({origins[path]}) has bytes that are no UTF-8: write it in that encoding")
        if any("\0" in str(text) for text in texts):
            raise ConfigError(f"{path} ({origins[path]}) has a character of the number 0: leave that out")
    if file is None:
        plain = cls.model_validate({})
        of_file = [path for path in sorted(TRUSTING) if origins.get(path, "").startswith("file ")]
        changed = [path for path in of_file if value_of(settings, path) != value_of(plain, path)]
        _tell(", ".join(f"{path} = {_shown(path, value_of(settings, path))}" for path in changed))
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
    """One line per setting: path, value and origin, secrets masked."""
    known = paths(type(settings))
    width = max(map(len, known))
    return [f"{path:<{width}} = {_shown(path, value_of(settings, path))}  ({origins[path]})" for path in known]


def describe_given(settings: ProgramSettings, origins: Origins) -> str:
    """What was set by a flag, a variable or the file, in one line for the start of the log; secrets masked."""
    given = [path for path in paths(type(settings)) if origins[path] != "default"]
    told = ", ".join(f"{path} = {_shown(path, value_of(settings, path))} ({origins[path]})" for path in given)
    return f"{told or 'nothing was set'}; --show-settings lists all"


def field_default(key: str, info: FieldInfo) -> str | None:
    """The default as `--help` shows it; None where the description names it."""
    if key in DERIVED or info.default in (None, (), False):
        return None
    return ", ".join(info.default) if isinstance(info.default, tuple) else str(info.default)


def _shown(path: str, value: object) -> str:
    if path in SECRETS and value:
        return f"({len(value)} set)" if isinstance(value, tuple) else "(set)"
    if value in (None, (), {}):
        return "(none)"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_Source = dict[str, tuple[object, str]]  # path -> (value, origin)


def _from_flags(cls: type[ProgramSettings], flags: Mapping[str, object]) -> _Source:
    given = {key: value for key, value in flags.items() if value not in (None, [], ())}
    known = {path for path in paths(cls) if "." not in path}
    _refuse_unknown(given, known, cls, lambda key: f"--{key.replace('_', '-')}", "flag ")
    return {key: (value, f"flag --{key.replace('_', '-')}") for key, value in given.items()}


def _from_env(cls: type[ProgramSettings], env: Mapping[str, str]) -> _Source:
    """Read variables; those of other programs are allowed, since all may share one environment. Empty: not set."""
    variables = {variable(path): path for schema in PROGRAMS for path in paths(schema)}
    ours = {name for name in env if name.startswith(PREFIX) and name != f"{PREFIX}CONFIG"}
    bare = {name.removeprefix(PREFIX).lower(): name for name in sorted(ours - variables.keys())}
    _refuse_unknown(bare, set(), cls, variable, "environment variable ")
    found = {variables[name]: name for name in ours if env[name]}
    return {path: (env[name], f"environment {name}") for path, name in found.items() if path in paths(cls)}


def _from_file(cls: type[ProgramSettings], file: Path | None) -> tuple[_Source, _Source]:
    """Read the file: (keys for all programs, keys of this program's table)."""
    path = file or DEFAULT_FILE
    if file is None and not os.path.lexists(path):  # nor where the working directory may not be entered
        return {}, {}
    try:
        if file is None and not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if file is None:
                _check_own(path, status)
            content = tomllib.loads(stream.read().decode("utf-8-sig"))  # Windows' editors begin with a mark
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    _warn_of_readers(path, status, content)
    own: _Source = {}
    for schema in PROGRAMS:
        table = _flat({schema.table: content.pop(schema.table, {})}, {schema.table}, f"in {path}", "")
        inside = {key.partition(".")[2]: value for key, value in table.items()}
        found = _flat(inside, set(tables_of(schema)), f"in {path}", f"{schema.table}.")
        _refuse_unknown(found, set(paths(schema)), schema, str, f"key in [{schema.table}] of {path}: ")
        if schema is cls:
            own = {key: (value, f"file {path} [{schema.table}]") for key, value in found.items()}
    tables = {name for schema in PROGRAMS for name in tables_of(schema)}
    found = _flat(content, tables, f"in {path}", "")
    _refuse_unknown(found, _known() | {schema.table for schema in PROGRAMS}, cls, str, f"key in {path}: ")
    return {key: (value, f"file {path}") for key, value in found.items() if key in paths(cls)}, own


def _flat(content: Mapping[str, object], tables: set[str], where: str, within: str) -> dict[str, object]:
    """The content with what is inside of tables as TABLE.KEY."""
    found: dict[str, object] = {}
    for key, value in content.items():
        if key not in tables:
            found[key] = value
        elif isinstance(value, dict):
            found |= {f"{key}.{each}": inside for each, inside in value.items()}
        else:
            raise ConfigError(f"{within}{key} {where} must be a table: [{within}{key}]")
    return found


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
    tables = [table for table in (content, *content.values()) if isinstance(table, dict)]
    inside = [(name, each) for table in tables for name, each in table.items() if isinstance(each, dict)]
    inner = {f"{name}.{key}" for name, each in inside for key in each}
    secrets = SECRETS & (inner | {key for table in tables for key in table})
    readers = 0o077 if status.st_uid == user_id() else 0o007  # root's file is this user's by its group
    if secrets and stat.S_ISREG(status.st_mode) and open_mode(status) & readers:
        _log.warning(
            "%s has %s and can be read by others: run `chmod 600 %s` if they are not to know its secrets",
            path,
            ", ".join(sorted(secrets)),
            path,
        )


def _known() -> set[str]:
    return {path for schema in PROGRAMS for path in paths(schema)}


def _refuse_unknown(
    given: Iterable[str], known: set[str], cls: type[ProgramSettings], spelt: Callable[[str], str], what: str
) -> None:
    """Raise ConfigError for a key that is not known: with the table that has it, else with the nearest one."""
    for key in given:
        if key in known:
            continue
        for path in (*paths(cls), *sorted(_known())):
            if "." in path and key in (path.rpartition(".")[2], path.replace(".", "_")):
                table, name = path.split(".")
                raise ConfigError(
                    f"{spelt(key)} is now {name} in [{table}] of the file, see --config, or {variable(path)}"
                )
        if (of := next((schema.table for schema in PROGRAMS if key in paths(schema)), None)) is not None:
            raise ConfigError(f"unknown {what}{spelt(key)}: it is one of [{of}]")
        near = max(sorted(known or _known()), key=functools.partial(_likeness, key))
        raise ConfigError(f"unknown {what}{spelt(key)}: did you mean {spelt(near)}?")


def _likeness(key: str, path: str) -> float:
    """Likeness of their names, 0 to 1, whatever tables they are in."""
    return difflib.SequenceMatcher(None, path.rpartition(".")[2], key.rpartition(".")[2]).ratio()


def _sentence(error: ValidationError, origins: Origins) -> str:
    faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
    fault = faults[0]
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "tuple_type":  # of which files know nothing
        message = 'a list is meant, as ["x"]'
    where = [str(part) for part in fault["loc"]]
    path = next((path for path in (".".join(where[:2]), *where[:1]) if path in origins), None)
    if path is None:
        return message  # of several settings
    shown = "(hidden)" if path in SECRETS else _USER.sub("://...@", repr(fault["input"]))
    return f"{'.'.join(where)} = {shown} ({origins[path]}) cannot be used: {message[:1].lower()}{message[1:]}"
