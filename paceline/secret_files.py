"""Secrets in files: private folders and files, written whole or not at all, and secrets that people pass in.

A secret on a command line can be read by every user of the machine (`ps`), and stays in the shell's history; so each
can be given in a file or over standard input instead. Not handled: an attacker who acts as this user.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.printable import is_text
from paceline.errors import ConfigError
from paceline.system import is_others, open_mode, sync_folder, user_id

STDIN = "-"
MAX_BYTES = 1 << 20
T = TypeVar("T")

_log = logging.getLogger("paceline.settings")


# ---- what people pass in --------------------------------------------------------------------------------------------
def given_secret(name: str, value: str | None, file: Path | None) -> str | None:
    """One secret: `value`, or the first line of standard input where that is "-", or of `file`. None: not given.

    At a terminal it is asked for, without an echo. Raises ConfigError, which calls it by `name`.
    """
    if value is not None and file is not None:
        raise ConfigError(f"--{name} and --{name}-file were both given: leave one out.")
    if value is not None and value != STDIN:
        return value
    if value is None and file is None:
        return None
    if file is None and sys.stdin.isatty():
        found = [getpass.getpass(f"{name}: ").strip()]
    elif file is None or str(file) == STDIN:
        found = [sys.stdin.readline().strip()]
    else:
        found = secret_lines(file)[:1]
    if not found or not found[0] or not is_text(found[0]):
        source = "standard input" if file is None else str(file)
        raise ConfigError(f"{source} has no {name}: it is expected in the first line, as text in UTF-8.")
    return found[0]


def secret_lines(file: Path) -> list[str]:
    """Secrets of a file, one a line, without blank lines and comments (#). `-`: standard input, to its end."""
    try:
        if str(file) == STDIN:
            text = sys.stdin.read(MAX_BYTES).encode(errors="surrogateescape").decode()  # as `main` has it read
        else:
            with file.expanduser().open("rb") as stream:
                status = os.fstat(stream.fileno())
                text = stream.read(MAX_BYTES).decode()
            if stat.S_ISREG(status.st_mode) and open_mode(status):
                _log.warning(
                    "%s can be read by others: run `chmod 600 %s` if they are not to know its secrets", file, file
                )
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not a text file.") from error
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


# ---- what the programs keep -----------------------------------------------------------------------------------------
def make_folder(folder: Path) -> None:
    """Make a folder, with those above it that are missing, each of mode 0700. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # made since, or a link to nothing, of which `stat` tells more
            each.mkdir(mode=0o700)
    if not stat.S_ISDIR(folder.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _is_for_others(file: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # a temporary one
        return bool(open_mode(status := file.lstat())) and not stat.S_ISLNK(status.st_mode)
    return False


def private_folder(folder: Path) -> None:
    """Make a folder, with those above it, that only this user may enter.

    One that exists is closed to others if nothing in it is open to them, as in an empty one. Raises OSError, and
    ConfigError for a folder of another user, in which others may replace files, or that has files for them.
    """
    make_folder(folder)
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (user_id(), 0):
        raise ConfigError(
            f"{folder} belongs to another user, who could replace what is in it: choose a folder of yours."
        )
    if is_others(status):
        raise ConfigError(
            f"Others may write to {folder} (mode {mode:04o}), and so replace what is in it: run `chmod 700 {folder}` "
            "if nobody has."
        )
    if open_mode(status) and status.st_uid == user_id():
        if any(map(_is_for_others, folder.iterdir())):
            raise ConfigError(
                f"Others may enter {folder} (mode {mode:04o}) and use files in it: choose a folder for Paceline alone, "
                f"or run `chmod 700 {folder}` if this is one."
            )
        _log.info("%s was open to others (mode %04o); it is closed to them now", folder, mode)
        folder.chmod(0o700)


def write_private(file: Path, content: bytes, *, replace: bool = True) -> bool:
    """Write a file of mode 0600 whole or not at all, and to the disk. False: it exists, and `replace` is False.

    Its folder must exist. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if replace:
            os.replace(name, file)
        else:
            os.link(name, file)
    except FileExistsError:
        return False
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    sync_folder(file.parent)  # the name, too, survives a power cut
    return True


class KeptJson:
    """JSON that a program keeps in its state directory, and begins anew where it is damaged. Methods may be called on
    any thread, one at a time. Not handled: two programs on one file; the later one's value stays."""

    def __init__(self, file: Path | None, what: str, empty: object) -> None:
        """file: None: nothing is kept. what: is lost with it, for the log. empty: what a file that is not there
        stands for."""
        self._file, self._what = file, what
        self._saved = empty

    def read(self, parsed: Callable[[Any], T], otherwise: T) -> T:
        """What was kept. parsed: raises ValueError, KeyError, TypeError or AttributeError for what it cannot be."""
        try:
            if self._file is None or (content := read_private(self._file, otherwise="remove it")) is None:
                return otherwise
            found = json.loads(content)
            value, self._saved = parsed(found), found
            return value
        except (OSError, ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged (%s): %s is forgotten", self._file, error, self._what)
            return otherwise

    def save(self, value: object) -> None:
        """Write it if it has changed. A disk that takes nothing costs a line in the log."""
        if self._file is None or value == self._saved:
            return
        try:
            private_folder(self._file.parent)
            write_private(self._file, json.dumps(value).encode())
        except (OSError, ConfigError) as error:
            _log.warning("%s cannot be kept in %s: %s", self._what, self._file, error)
            return
        self._saved = value


def read_private(file: Path, *, otherwise: str) -> bytes | None:
    """Content of a private file; None if there is none.

    Raises ConfigError for one that cannot be read, or that others can: `otherwise` says what to do if somebody has.
    """
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            content = stream.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    if open_mode(status):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{file} can be read by others (mode {mode:04o}): run `chmod 600 {file}`, and {otherwise} if somebody may "
            "have read it."
        )
    return content
