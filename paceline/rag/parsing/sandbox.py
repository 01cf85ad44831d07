"""What is taken from a parser process: resources by limits, the network by a namespace and a filter of calls.

The network is taken on Linux only, where the machine allows it: `isolate` says whether it is out of reach. Files are
taken by `landlock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys

from paceline.rag.parsing.kinds import Limits

_MAX_FILES = 64  # open ones: modules that a library imports late, and few others
_SPARE = 64 * 2**20  # bytes of address space for saying that there was too little

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SECCOMP_MODE_FILTER = 2
_ALLOW, _DENY = 0x7FFF0000, 0x00050001  # the second: the call fails with EPERM
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of BPF
# By machine: the architecture's number in the audit interface, and the calls that a parser has no use for: socket,
# connect, execve, execveat, ptrace, process_vm_readv, process_vm_writev, io_uring_setup, pidfd_getfd.
_DENIED = {
    "x86_64": (0xC000003E, (41, 42, 59, 322, 101, 310, 311, 425, 438)),
    "aarch64": (0xC00000B7, (198, 203, 221, 281, 117, 270, 271, 425, 438)),
}
_OTHER_ABI = 0x40000000  # numbers from here on are those of another call interface (x32)


def isolate() -> bool:
    """Take the network, other programs and other processes' memory from this process and its children.

    Returns False where the network can still be reached.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    in_namespace = libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    return _filter_calls(libc) or in_namespace


def limit(limits: Limits) -> None:
    """Limit this process, which parses one document. The kernel ends it beyond the times."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    kinds = {
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes + _SPARE),
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


def spare_memory() -> None:
    """Allow a little more memory, to say that there was too little."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Install the filter of system calls for this process and its children. False where that is not possible."""
    if os.uname().machine not in _DENIED:
        return False
    architecture, denied = _DENIED[os.uname().machine]
    count = len(denied)
    # A jump counts from the next instruction. The last but one allows the call, the last denies it.
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 0, count + 3, architecture),
        (_LOAD, 0, 0, 0),  # the call's number
        (_AT_LEAST, count + 1, 0, _OTHER_ABI),
        *((_EQUAL, count - i, 0, number) for i, number in enumerate(denied)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0)
