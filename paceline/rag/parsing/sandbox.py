"""What is taken from a parser process: resources by limits, the network by a namespace, every system call that parsing
has no use for by a filter, and the user's files and signals to other processes by Landlock.

On Linux only, where the machine allows it: `isolate` and `hide_files` say what is out of reach. By Landlock (5.13 on)
the process and its children may read the files of Python, of its libraries and of the system's libraries, and what they
have open already; they may write, make and remove nothing. Where the kernel's version knows them, TCP, abstract Unix
sockets and signals to processes outside are refused too. Not handled: the names, sizes and times of files elsewhere
(`stat` is not restricted by Landlock).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import paceline
from paceline.rag.parsing.kinds import Limits
from paceline.system import HAS_USERS

if HAS_USERS:
    import resource

_MAX_FILES = 64  # open ones: modules that a library imports late, and few others
_SPARE = 64 * 2**20  # bytes of address space for saying that there was too little

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SECCOMP_MODE_FILTER = 2
_ALLOW, _DENY = 0x7FFF0000, 0x00050001  # the second: the call fails with EPERM
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # of BPF
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # their numbers in the audit interface
# The calls that are left, whatever library parses, by their numbers on these machines; -1: there is none. They read
# modules and the document, and are about memory, signals to the process itself, the clock, and its end.
_PARSING = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "pread64": (17, 67),
    "readv": (19, 65), "writev": (20, 66), "newfstatat": (262, 79), "statx": (332, 291), "getdents64": (217, 61),
    "getdents": (78, -1), "readlink": (89, -1), "readlinkat": (267, 78), "access": (21, -1), "faccessat": (269, 48),
    "faccessat2": (439, 439), "getcwd": (79, 17), "stat": (4, -1), "lstat": (6, -1), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233),
    "futex": (202, 98), "sched_yield": (24, 124), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "poll": (7, -1), "ppoll": (271, 73), "restart_syscall": (219, 128), "dup": (32, 23), "dup2": (33, -1),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "time": (201, -1), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "getrandom": (318, 278), "getpid": (39, 172), "uname": (63, 160),
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "gettid": (186, 178), "exit": (60, 93), "exit_group": (231, 94), "dup3": (292, 24),
}  # fmt: skip
# What the process needs besides that forks the one that parses, as does the latter until its limits are set.
_FORKING = {
    "sendto": (44, 206), "recvmsg": (47, 212), "wait4": (61, 260), "clone": (56, 220), "kill": (62, 129),
    "setpriority": (141, 140), "getpriority": (140, 141), "prctl": (157, 167), "setitimer": (38, 103),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "pidfd_open": (434, 434), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446), "seccomp": (317, 277), "ioctl": (16, 29),
    "fcntl": (72, 25), "fork": (57, -1),
}  # fmt: skip
_OPENING, _CHANGING = (257, 56), os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC  # `openat` without these is allowed


def isolate() -> bool:
    """Take the network, other programs and other processes from this process, which forks others, and its children.

    Returns False where the network can still be reached.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    in_namespace = libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    return _filter_calls(libc, _PARSING | _FORKING) or in_namespace


def limit(limits: Limits) -> mmap.mmap:
    """Limit this process, which parses one document, and leave it the calls for that alone. The kernel ends it beyond
    the times. Returns memory to close, to say that there was too little. Windows has none of it.
    """
    if not HAS_USERS:
        return mmap.mmap(-1, _SPARE)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    kinds = {
        resource.RLIMIT_AS: (limits.memory_bytes + _SPARE, limits.memory_bytes + _SPARE),
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
        resource.RLIMIT_NOFILE: (_MAX_FILES, _MAX_FILES),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NPROC: (0, 0),
    }
    for kind, (soft, hard) in kinds.items():
        _, highest = resource.getrlimit(kind)
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        try:
            resource.setrlimit(kind, (soft, hard))
        except (OSError, ValueError):
            if sys.platform == "linux":
                raise  # elsewhere not every limit can be set
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    os.nice(5)  # answers come first
    if sys.platform == "linux":
        _filter_calls(ctypes.CDLL(None, use_errno=True), _PARSING)
    return mmap.mmap(-1, _SPARE)


def _filter_calls(libc: ctypes.CDLL, calls: Mapping[str, tuple[int, int]]) -> bool:
    """Leave this process and its children these calls, and reading. False where that is not possible."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        return False
    column = list(_MACHINES).index(machine)
    allowed = [numbers[column] for numbers in calls.values() if numbers[column] >= 0]
    count = len(allowed)
    # A jump counts from the next instruction. The last but one denies the call, the last allows it.
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 0, count + 5, _MACHINES[machine]),
        (_LOAD, 0, 0, 0),  # the call's number; that of another interface (x32) is none of these
        *((_EQUAL, count - i + 4, 0, number) for i, number in enumerate(allowed)),
        (_EQUAL, 0, 3, _OPENING[column]),
        (_LOAD, 0, 0, 32),  # its flags
        (_AND, 0, 0, _CHANGING),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0)


# ---- Landlock -------------------------------------------------------------------------------------------------------
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # numbers of the calls, the same on every architecture
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# The rights over files that each version of the interface restricts: the first 13, then moving between folders,
# truncating, and ioctl on devices.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_FROM, _TCP = 4, 0b11  # version; bind and connect
_SCOPES_FROM, _SCOPES = 6, 0b11  # version; abstract Unix sockets and signals
_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store"),
    *("/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"),
    *("/usr/share/tesseract-ocr", "/usr/share/tessdata"),
)


def hide_files() -> bool:
    """Take the files from this process and its children. Returns False where the machine does not allow it."""
    known = version()
    if known < 1:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    handled = _handled(known)
    ruleset = _call(libc, _CREATE, handled, ctypes.c_size_t(len(handled)), 0)
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


def _call(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    return int(libc.syscall(ctypes.c_long(number), *arguments))
