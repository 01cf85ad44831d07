"""What is taken from a parser process: resources by limits, the network by a namespace, and every system call that
parsing has no use for by a filter.

Network and calls are taken on Linux only, where the machine allows it: `isolate` says whether the network is out of
reach. Files are taken by `landlock`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence

from paceline.rag.parsing.kinds import Limits

_MAX_FILES = 64  # open ones: modules that a library imports late, and few others
_SPARE = 64 * 2**20  # bytes of address space for saying that there was too little

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SECCOMP_MODE_FILTER = 2
_ALLOW, _DENY = 0x7FFF0000, 0x00050001  # the second: the call fails with EPERM
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # of BPF
# By machine: the architecture's number in the audit interface, and the calls that are left, whatever library parses.
# For reading modules and the document, memory, signals of its own, the clock, and its end; `openat` for reading alone.
_OPEN_AT = {"x86_64": 257, "aarch64": 56}
_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PARSING = {
    "x86_64": (
        0xC000003E,
        (
            *(0, 1, 3, 5, 8, 17, 19, 20, 262, 332, 217, 78, 89, 267, 21, 269, 439, 79, 4, 6),  # files
            *(9, 10, 11, 12, 25, 28, 202, 24, 218, 273),  # memory, locks
            *(13, 14, 15, 131, 7, 271, 219, 32, 33),  # signals, waiting, descriptors
            *(35, 96, 97, 98, 99, 201, 228, 229, 230, 318, 39, 63, 102, 104, 107, 108, 110, 186),  # what is asked
            *(60, 231),  # the end
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(63, 64, 57, 80, 62, 67, 65, 66, 79, 291, 61, 78, 48, 439, 17),
            *(222, 226, 215, 214, 216, 233, 98, 124, 96, 99),
            *(134, 135, 139, 132, 73, 128, 23, 24),
            *(101, 169, 163, 165, 179, 113, 114, 115, 278, 172, 160, 174, 175, 176, 177, 173, 178),
            *(93, 94),
        ),
    ),
}
# What the process needs besides that forks the one that parses, and the latter until its limits are set: sendto,
# recvmsg, wait4, clone, kill, setpriority, getpriority, prctl, setitimer, prlimit64, pidfd_open, landlock's three,
# seccomp, ioctl, fcntl, fork.
_FORKING = {
    "x86_64": (44, 47, 61, 56, 62, 141, 140, 157, 38, 302, 160, 434, 444, 445, 446, 317, 16, 72, 57),
    "aarch64": (206, 212, 260, 220, 129, 140, 141, 167, 103, 261, 164, 434, 444, 445, 446, 277, 29, 25),
}


def isolate() -> bool:
    """Take the network, other programs and other processes from this process, which forks others, and its children.

    Returns False where the network can still be reached.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    in_namespace = libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    return _filter_calls(libc, _FORKING) or in_namespace


def limit(limits: Limits) -> mmap.mmap:
    """Limit this process, which parses one document, and leave it the calls for that alone. The kernel ends it beyond
    the times. Returns memory to close, to say that there was too little.
    """
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
        _filter_calls(ctypes.CDLL(None, use_errno=True), {})
    return mmap.mmap(-1, _SPARE)


def _filter_calls(libc: ctypes.CDLL, more: Mapping[str, Sequence[int]]) -> bool:
    """Leave this process and its children the calls of parsing and `more`. False where that is not possible."""
    machine = os.uname().machine
    if machine not in _PARSING:
        return False
    architecture, allowed = _PARSING[machine]
    allowed = (*allowed, *more.get(machine, ()))
    count = len(allowed)
    # A jump counts from the next instruction. The last but one denies the call, the last allows it.
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 0, count + 5, architecture),
        (_LOAD, 0, 0, 0),  # the call's number; that of another interface (x32) is none of these
        *((_EQUAL, count - i + 4, 0, number) for i, number in enumerate(allowed)),
        (_EQUAL, 0, 3, _OPEN_AT[machine]),
        (_LOAD, 0, 0, 32),  # its flags
        (_AND, 0, 0, _CHANGING),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0)
