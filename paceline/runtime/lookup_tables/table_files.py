"""Files of look-up tables: safetensors, written to a temporary name and renamed, so that none is ever half written.

An owner's file may be sealed: then it holds one array of bytes, the table as another safetensors file, encrypted with a
key of its own that stands wrapped in the metadata. That key is overwritten when the file is removed or replaced. Names
of owners and numbers of rows are not hidden. A damaged file counts as missing.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from paceline.core.drafting.lookup_table import Arrays
from paceline.errors import ConfigError
from paceline.sealing.seal import PLAIN, DamagedError, Seal
from paceline.secret_files import private_folder

log = logging.getLogger("paceline.tables")

FORMAT: Final = "paceline look-up table 1"
SUFFIX: Final = ".safetensors"
_SEALED: Final = "sealed"  # name of the only array of a sealed file
_OF_SEALED: Final = frozenset({"key", "rows"})  # further metadata of a sealed file
_PLACE: Final = "table"

Kind = Literal["base", "owner"]


class TableFile(NamedTuple):
    """A file in the folder, as `paceline tables list` shows it."""

    path: Path
    kind: Kind
    owner: str  # "" for a base
    vocabulary: str
    rows: int
    num_bytes: int


def table_files(folder: Path) -> list[TableFile]:
    """Files of every vocabulary, without unreadable ones. No key is needed."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if (metadata := _metadata(path)) is not None:
            kind, owner = cast(Kind, metadata.get("kind")), metadata.get("owner", "")
            rows, size = int(metadata["rows"]), path.stat().st_size
            found.append(TableFile(path, kind, owner, metadata.get("vocabulary", ""), rows, size))
    return found


def encode_table(name: str, arrays: Arrays, metadata: dict[str, str], seal: Seal = PLAIN) -> bytes:
    """Content of the file of this name."""
    if not seal.is_on:
        return save(dict(arrays), metadata=metadata)
    key, box = seal.make_key(name)
    sealed = np.frombuffer(box.seal(save(dict(arrays)), _PLACE), np.uint8)
    return save({_SEALED: sealed}, metadata={**metadata, "rows": str(len(arrays["tokens"])), "key": key.hex()})


def read_table(path: Path, seal: Seal = PLAIN) -> tuple[dict[str, str], Arrays] | None:
    """Metadata and arrays; None where the file is missing or not a look-up table that `seal` opens."""
    while True:
        before = _inode(path)
        try:
            return _read(path, seal)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, SafetensorError, DamagedError) as error:
            if _inode(path) != before:  # another process has replaced it meanwhile, and overwritten the former's key
                continue
            log.warning("a look-up table cannot be read: %s: %s", path.name, error)
            return None


def seal_plain_tables(folder: Path, seal: Seal) -> None:
    """Seal the owners' files that are in plain text. What cannot be written stays as it is, with a log message."""
    for path in folder.glob(f"owner-*{SUFFIX}"):
        metadata = _metadata(path)
        opened = read_table(path) if metadata is not None and "key" not in metadata else None
        if opened is not None:
            facts, arrays = opened
            part = path.with_name(f".{os.getpid()}-{path.name}.part")
            write_table(part, path, encode_table(path.name, arrays, facts, seal), whole=True)


def write_table(part: Path, path: Path, content: bytes, *, whole: bool = False) -> bool:
    """Write a file by way of `part`; see `replace_table`. False, with a log message, where the disk fails."""
    try:
        try:
            write_part(part, content)
            replace_table(part, path, whole=whole)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ConfigError) as error:
        log.warning("a look-up table cannot be kept: %s", error)
        return False
    return True


def write_part(part: Path, content: bytes) -> None:
    """Write a private temporary file, to the disk. Raises OSError, and as `private_folder` does."""
    private_folder(part.parent)
    part.touch(mode=0o600)
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())  # after a power cut the file is never empty


def replace_table(part: Path, path: Path, *, whole: bool = False) -> None:
    """Rename `part` to `path`, and overwrite the key of the file that was there; `whole`: all of it. Raises OSError."""
    try:
        former = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        part.replace(path)
        return
    try:
        part.replace(path)
        _overwrite(former, whole=whole)
    finally:
        os.close(former)


def remove_table(path: Path) -> bool:
    """Overwrite and remove a file. False if there was none. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        path.unlink(missing_ok=True)
        _overwrite(descriptor, whole=True)
    finally:
        os.close(descriptor)
    return True


# ---- internal -------------------------------------------------------------------------------------------------------
def _read(path: Path, seal: Seal) -> tuple[dict[str, str], Arrays]:
    with safe_open(path, framework="numpy") as file:
        metadata = _checked(dict(file.metadata() or {}))
        if "key" not in metadata:
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        sealed = file.get_tensor(_SEALED).tobytes()
    if not seal.is_on:
        raise ValueError("it is encrypted, and its key is gone")
    arrays = load(seal.box(bytes.fromhex(metadata["key"]), path.name).open(sealed, _PLACE))
    return {name: value for name, value in metadata.items() if name not in _OF_SEALED}, arrays


def _metadata(path: Path) -> dict[str, str] | None:
    """Metadata with the number of rows, without reading the table; None as `read_table`."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = _checked(dict(file.metadata() or {}))
            return {"rows": str(file.get_slice("tokens").get_shape()[0]) if "key" not in metadata else "0", **metadata}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SafetensorError) as error:
        log.warning("a look-up table cannot be read: %s: %s", path.name, error)
        return None


def _checked(metadata: dict[str, str]) -> dict[str, str]:
    if metadata.get("format") != FORMAT:
        raise ValueError("it is no look-up table")
    return metadata


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _overwrite(descriptor: int, *, whole: bool) -> None:
    """Overwrite the header of a sealed file, which holds its key; of any other nothing, or all of it."""
    start = os.pread(descriptor, 8, 0)
    header = 8 + int.from_bytes(start, "little")
    size = os.fstat(descriptor).st_size
    sealed = header <= size and b'"key"' in os.pread(descriptor, header, 0)
    if sealed or whole:
        os.pwrite(descriptor, bytes(header if sealed else size), 0)
        os.fsync(descriptor)
