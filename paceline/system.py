"""This operating system: who its files belong to, its processor, and limits, locks and signals that not every one has.

Linux has all of it. Where something is missing (Windows has no users, modes or process groups; macOS keeps no thread on
a core) each function says what it does instead, and `missing` lists what that leaves open. What is taken from the
process that parses documents is in `rag.parsing.sandbox`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from ssl import SSLCertVerificationError, SSLError
from threading import Semaphore, Thread
from time import monotonic, process_time
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from paceline.core.addresses import is_loopback
from paceline.core.printable import printable

try:  # not on Windows
    import fcntl
    import grp
    import pwd
    import resource

    HAS_USERS: Final = True  # files have an owner and a mode
except ImportError:
    HAS_USERS = False  # type: ignore[misc]

T = TypeVar("T")

CPU_INFO: Final = Path("/proc/cpuinfo")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")
DEVICES: Final = Path("/dev")
PROXY: Final = re.compile(r"(https?|wss?|all|socks)_proxy", re.IGNORECASE)


def missing() -> list[str]:
    """What this system does not protect or limit, a sentence's part each; of what `rag.parsing` needs see there."""
    found = []
    if not HAS_USERS:
        found.append("files are as private as their folder, whose access the program neither checks nor changes")
        found.append("two programs on one state directory do not notice each other")
    if not hasattr(os, "sched_setaffinity"):
        found.append("threads are not kept on cores")
    return found


def may_have_gpu() -> bool:
    """False only where no driver of a GPU that torch computes on is loaded: then torch need not be imported to ask."""
    drivers = ("nvidia*", "nvmap", "nvhost*", "kfd", "dxg")  # NVIDIA's, those of its boards, AMD's, Windows' in Linux
    return platform.system() != "Linux" or any(next(DEVICES.glob(name), None) for name in drivers)


def unusable_proxy() -> str:
    """Advice for a proxy of the environment that a library has refused; empty where that names none. The library's own
    words may show the proxy's password."""
    named = {name: value for name, value in os.environ.items() if PROXY.fullmatch(name) and value}
    unlike = [name for name, value in named.items() if not value.lower().startswith(("http://", "https://"))]
    names = " or ".join(sorted(unlike or named))
    return names and (
        f"the proxy that {names} names cannot be used: give one such as http://proxy.example:3128, unset the variable, "
        "or set NO_PROXY to *"
    )


def by_proxy(url: str) -> str:
    """Words for a message about an address that is asked through a proxy of the environment; empty for any other."""
    parts = urlsplit(url)
    scheme, host = parts.scheme.replace("ws", "http"), parts.hostname or ""
    if is_loopback(host) or not {scheme, "all"} & getproxies().keys() or proxy_bypass(host):
        return ""
    return f" through the proxy that {scheme.upper()}_PROXY or ALL_PROXY names"


def tls_fault(url: str, error: BaseException) -> str:
    """Why a connection to a server has no encryption that can be trusted, and what to do; empty for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SSLCertVerificationError):
            return (
                f"{url} has a certificate that this machine does not trust ({printable(cause.verify_message)}): have "
                "the server use one that it does, add its authority to this system, or name that one's file in "
                "SSL_CERT_FILE"
            )
        if isinstance(cause, SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
            return f"{url} does not speak https: give the address of a proxy in front that does, or one with http"
        cause = cause.__cause__ or cause.__context__
    return ""


# ---- users and files ------------------------------------------------------------------------------------------------
def user_id() -> int:
    """Of this program's user; 0, as of every file, where files have no owner."""
    return os.geteuid() if HAS_USERS else 0


def is_others(status: os.stat_result) -> bool:
    """True where another user than this one and root owns it or may write it. False where files have no owner."""
    if not HAS_USERS:
        return False
    by_group = bool(status.st_mode & 0o020)
    if by_group:
        with contextlib.suppress(KeyError):  # distributions make a group for each user, and a umask of 002
            user, group = pwd.getpwuid(user_id()), grp.getgrgid(status.st_gid)
            is_own = (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name)
            by_group = not is_own or not {*group.gr_mem} <= {user.pw_name}
    return status.st_uid not in (user_id(), 0) or by_group or bool(status.st_mode & 0o002)


def open_mode(status: os.stat_result) -> int:
    """The part of a file's mode that lets others than its owner in; 0 where files have no modes."""
    return status.st_mode & 0o077 if HAS_USERS else 0


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk. Windows does so by itself. Raises OSError."""
    if not HAS_USERS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, alone: bool) -> bool:
    """Lock an open file, alone or with others, instead of the lock held before. False: not alone, others have it.

    True, without a lock, where there are none. Shared locks are waited for.
    """
    if not HAS_USERS:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    return True


def open_files() -> int | None:
    """Files that this process may have open; None: as many as it likes, or the system does not say."""
    if not HAS_USERS:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_files(wanted: int) -> int | None:
    """Let this process have so many files open, or as many as it may; what `open_files` then is."""
    soft = open_files()
    if soft is None:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return open_files()


# ---- processes ------------------------------------------------------------------------------------------------------
def signal_group(process: subprocess.Popen[bytes], *, kill: bool) -> None:
    """Ask a process that leads its session, and all that it has started, to end; kill: at once. Without process groups
    that process alone."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        elif kill:
            process.kill()
        else:
            process.terminate()


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """`malloc_trim(3)`; None where the C library has none."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_size_t,), ctypes.c_int
    return found


def trim_heap() -> None:
    """Give the C library's free memory back to the system: glibc keeps what loading weights and long batches have
    freed. Elsewhere nothing is done. Takes some milliseconds, and holds no lock of Python's meanwhile."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


# ---- limits of containers -------------------------------------------------------------------------------------------
def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and those around it (Linux, versions 1 and 2)."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            group = root / path.lstrip("/")  # as it is called outside, so it may not be there
            yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def _numbers(group: Path, name: str) -> list[int]:
    """A file's numbers; none for "max", which is no limit, and where there is no such file."""
    try:
        return [int(word) for word in (group / name).read_text().split()]
    except (OSError, ValueError):
        return []


def usable_memory() -> tuple[int, int]:
    """Bytes that this process may still take, and that it might at all: the machine's, or a container's limit, within
    which files that can be read again count as free."""
    import psutil  # takes a tenth of a second, which a command's help has no use for

    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    for group in _groups("memory"):
        limit = _numbers(group, "memory.max") or _numbers(group, "memory.limit_in_bytes")
        used = _numbers(group, "memory.current") or _numbers(group, "memory.usage_in_bytes")
        if limit and used:
            free, total = min(free, limit[0] - used[0] + _files(group)), min(total, limit[0])
    return max(free, 0), total


def _files(group: Path) -> int:
    """Bytes of files in memory."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, str] = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        of_all = "total_" if "total_inactive_file" in found else ""  # with groups within, in version 1
        return sum(int(found.get(f"{of_all}{kind}_file", "0")) for kind in ("active", "inactive"))
    return 0


# ---- the processor --------------------------------------------------------------------------------------------------
def cores(process: int = 0) -> frozenset[int]:
    """Numbers of the cores that this thread may use, or a process's first one; all, where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(process))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Cores that this process may keep busy: those it may use, and no more than a container's limit on its time pays
    for, since threads that the limit stops hold up those that wait for them. At least 1."""
    return max(1, int(min(len(cores()), _time_limit())))


def _time_limit() -> float:
    """Processor time a second; infinity: not limited."""
    found = [math.inf]
    for group in _groups("cpu"):
        pair = _numbers(group, "cpu.max") or _numbers(group, "cpu.cfs_quota_us") + _numbers(group, "cpu.cfs_period_us")
        if len(pair) > 1 and min(pair) > 0:  # -1 is no limit
            found.append(pair[0] / pair[1])
    return min(found)


class _FreeCores:
    _LOOK_S: Final = 0.25
    _LEAST: Final = 0.4  # of a core's time, for a thread: with less, it holds up more than it does
    _FADING: Final = 0.6  # of what others took at a look, that is still counted at the next

    def __init__(self) -> None:
        self._cores, self._others = sorted(cores(os.getpid())), 0.0  # not those that an engine's thread is kept on
        self._at, self._own, self._busy = monotonic(), process_time(), self._look()

    def count(self) -> int:
        now = monotonic()
        if (passed := now - self._at) >= self._LOOK_S:
            own, busy = process_time(), self._look()
            others = (busy - self._busy - own + self._own) / passed
            self._at, self._own, self._busy = now, own, busy
            self._others = max(others, self._FADING * self._others)
        return max(1, int(len(self._cores) - self._others + 1 - self._LEAST))

    def _look(self) -> float:
        """Seconds that the cores have computed."""
        import psutil

        try:
            times = psutil.cpu_times(percpu=True)
        except OSError:  # Android shows them to nobody
            return 0.0
        idle = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as users too
        return sum(
            sum(times[core]) - sum(getattr(times[core], kind, 0.0) for kind in idle)
            for core in self._cores
            if core < len(times)
        )


_free_cores: Final = cache(_FreeCores)


def free_cores() -> int:
    """Cores that other processes leave to this one, as they were a moment ago: at least 1.

    A model's threads wait for one another at every operation, awake: one that has no core holds up all, and they keep
    a core from whoever it waits for. So where others compute, a step by fewer threads is the faster one. A core that
    becomes free counts after a second of it. Two programs that ask here share the cores, not always evenly.
    """
    return _free_cores().count()


class Threads(ThreadPoolExecutor):
    """An executor that has a thread from the start, so that a limit on threads which is too low shows there, and goes
    on with those it has where the system gives no more."""

    def __init__(
        self,
        num_threads: int | None,
        name: str,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        """num_threads: at most; None: as many as asyncio has."""
        super().__init__(num_threads, name, initializer, initargs)
        self.submit(bool)

    def _adjust_thread_count(self) -> None:
        if self._work_queue.qsize() > 1:  # nobody is idle, whatever the count of idle threads says after a shortage
            self._idle_semaphore = Semaphore(0)
        try:
            super()._adjust_thread_count()
        except RuntimeError:  # by then the work is in the queue
            if not self._threads:
                raise


def in_own_thread(call: Callable[[], T]) -> T:
    """Call in a thread that ends with the call, and with it the threads that OpenMP keeps for each that has computed.

    Where all of those are more than the cores, an engine's no longer wait awake for the next kernel, and a step takes
    up to twice its time. So a model that one thread loads and another computes with is loaded in this way.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return outcome.result()


def processor_flags() -> frozenset[str]:
    """Instruction sets, as Linux spells them; empty on other systems."""
    try:
        lines = CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())
