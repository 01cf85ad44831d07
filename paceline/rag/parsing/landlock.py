"""What is taken from a parser process besides `sandbox`: the user's files and signals to other processes, by Landlock.

Afterwards the process and its children may read the files of Python, of its libraries and of the system's libraries,
and what they have open already; they may write, make and remove nothing. Where the kernel's version knows them, TCP,
abstract Unix sockets and signals to processes outside are refused too. Linux from 5.13 on, if Landlock is switched on.

Not handled: the names, sizes and times of files elsewhere (`stat` is not restricted by Landlock).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import paceline

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # numbers of the calls, the same on every architecture
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# The rights over files that each version of the interface restricts: the first 13, then moving between folders,
# truncating, and ioctl on devices.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_FROM, _TCP = 4, 0b11  # version; bind and connect
_SCOPES_FROM, _SCOPES = 6, 0b11  # version; abstract Unix sockets and signals
_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store"),
    *("/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"),
)


def hide_files() -> bool:
    """Take the files from this process and its children. Returns False where the machine does not allow it."""
    known = version()
    if known < 1:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    ruleset = _call(libc, _CREATE, *_sized(_handled(known)), 0)
    if ruleset < 0:
        return False
    try:
        for path in readable():
            _allow(libc, ruleset, path)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return _call(libc, _RESTRICT, ctypes.c_int(ruleset), 0) == 0
    finally:
        os.close(ruleset)


def version() -> int:
    """Version of the kernel's interface; below 1: there is none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    return _call(ctypes.CDLL(None, use_errno=True), _CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG)


def readable() -> Iterator[Path]:
    """What a parser may still read.

    Of the places that modules come from, those of installed packages: others, such as the folder that the program was
    started in, may hold the user's files.
    """
    yield Path(paceline.__file__).parent
    yield from (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    yield Path(sys.base_prefix, "lib")
    for path in map(Path, sys.path):
        if path.is_file() or _has_packages(path):
            yield path
    yield from map(Path, _SYSTEM)


def _has_packages(folder: Path) -> bool:
    if folder.name in ("site-packages", "dist-packages"):
        return True
    return folder.is_absolute() and folder.is_dir() and next(folder.glob("*.dist-info"), None) is not None


def _handled(known: int) -> bytes:
    """`struct landlock_ruleset_attr`, as long as version `known` has it: everything that it can refuse."""
    files = max(rights for since, rights in _FILE_RIGHTS.items() if since <= known)
    fields = [files]
    if known >= _NET_FROM:
        fields.append(_TCP)
    if known >= _SCOPES_FROM:
        fields.append(_SCOPES)
    return struct.pack(f"={len(fields)}Q", *fields)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path) -> None:
    """Allow reading a file, or a folder with all below it. A path that is not there is left out."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _READ_FILE | _READ_DIR if path.is_dir() else _READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened))  # `landlock_path_beneath_attr`
        _call(libc, _ADD_RULE, ctypes.c_int(ruleset), _PATH_BENEATH, rule, 0)
    finally:
        os.close(opened)


def _sized(data: bytes) -> tuple[ctypes.Array[ctypes.c_char], ctypes.c_size_t]:
    return ctypes.create_string_buffer(data, len(data)), ctypes.c_size_t(len(data))


def _call(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    return int(libc.syscall(ctypes.c_long(number), *arguments))
