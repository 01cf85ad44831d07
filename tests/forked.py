"""Programs started by fork from one that has imported the package: a start is most of what a short scenario costs.

`starting` replaces `subprocess.Popen` in this process for a while. A Python program of the package is then a fork of
one that has imported it and has done nothing else: with its own arguments, environment, working directory, streams and
session, and a child of this process, which waits for it and kills it as any other. What differs from a start by exec:
`/proc/PID/cmdline` and `environ` are those of the process that was forked, all have the same hash seed, and at its end
none takes its modules apart. Other programs, and those with a `preexec_fn` or `pass_fds`, start as ever; so does
everything in a nightly run. However a program is started, tests may change its environment (`Usual.environment`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

IMPORTED: Final = (
    "paceline.commands.main",
    "paceline.server.program",
    "paceline.device_agent.program",
    "paceline.client.commands",
    "paceline.commands.diagnosis",
    "server.program",
    "device_agent.program",
    "server.commands",
    "device_agent.commands",
    "paceline.engine.paged.engine",
    "transformers.models.llama.modeling_llama",
)
ROOT: Final = Path(__file__).parents[1]
MESSAGE: Final = 1 << 17  # bytes: arguments and environment
SET_CHILD_SUBREAPER: Final = 36  # of prctl(2)


# ---- in the tests' process ------------------------------------------------------------------------------------------
class Usual(subprocess.Popen[Any]):
    """A start by exec."""

    environment: Callable[[Sequence[str], Mapping[str, str], Path], dict[str, str]] | None = (
        None  # of a program of ours
    )

    def __init__(self, args: Sequence[str], **more: Any) -> None:
        if self.environment is not None and args[0] == sys.executable:
            given = os.environ if more.get("env") is None else more["env"]
            more["env"] = self.environment(args, given, Path(more.get("cwd") or "."))
        super().__init__(args, **more)


USUAL: Final = Usual
Starts = type[Usual]


@contextmanager
def forked_starts() -> Iterator[Starts]:
    """How to start programs by fork, for `starting`; the usual way where the system hands no process to an ancestor."""
    if not _be_subreaper(True):
        yield USUAL
        return
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [sys.executable, "-m", "tests.forked", str(there.fileno())]
    with closing(here):
        with closing(there):
            parent = subprocess.Popen(arguments, cwd=ROOT, pass_fds=[there.fileno()], start_new_session=True)
        yield type("Forked", (_Forked,), {"control": here})
    parent.wait()  # it ends with `here`


@contextmanager
def starting(kind: Starts) -> Iterator[None]:
    """Programs that this process starts meanwhile start so."""
    before = subprocess.Popen
    _be_subreaper(kind is not USUAL)
    setattr(subprocess, "Popen", kind)  # noqa: B010  # mypy takes an assignment for a mistake
    try:
        yield
    finally:
        setattr(subprocess, "Popen", before)  # noqa: B010
        _be_subreaper(issubclass(before, _Forked))


def _be_subreaper(wanted: bool) -> bool:
    """Become the parent of orphaned descendants, or no longer. False where the system knows no such thing."""
    try:
        return bool(ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) == 0)
    except (AttributeError, OSError, TypeError):
        return False


class _Forked(Usual):
    control: socket.socket
    turn = threading.Lock()  # one start at a time

    def _execute_child(
        self,
        args: Sequence[str],
        executable: str | None,
        preexec_fn: object,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | None,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: int | None,
        gids: object,
        uid: int | None,
        umask: int,
        start_new_session: bool,
        process_group: int,
    ) -> None:
        """As `subprocess.Popen` has it: the one place where a process is made."""
        if preexec_fn is not None or pass_fds or not _is_ours(args):
            super()._execute_child(  # type: ignore[misc]  # not in typeshed
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
            return
        told = {
            "arguments": list(args[1:]),
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        streams = [each if each != -1 else own for own, each in enumerate((p2cread, c2pwrite, errwrite))]
        with self.turn:
            socket.send_fds(self.control, [json.dumps(told).encode()], streams)
            self.pid = int(self.control.recv(MESSAGE))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _is_ours(args: Sequence[str]) -> bool:
    return args[0] == sys.executable and (args[1] == "-c" or tuple(args[1:3]) == ("-m", "paceline"))


# ---- in the process that is forked ----------------------------------------------------------------------------------
def _next_program(control: socket.socket) -> Sequence[str] | None:
    """Fork for each start that is asked for. Returns its arguments in the new process; None here, at the end."""
    while True:
        asked, streams, _, _ = socket.recv_fds(control, MESSAGE, 3)
        if not asked:
            return None
        read, write = os.pipe()
        # The process in between ends at once, so that the tests' process becomes the parent.
        if (between := os.fork()) == 0:
            if (program := os.fork()) != 0:
                os.write(write, str(program).encode())
                os._exit(0)
            for each in (read, write):
                os.close(each)
            control.close()
            return _become(json.loads(asked), streams)
        for each in (write, *streams):
            os.close(each)
        os.waitpid(between, 0)
        control.send(os.read(read, MESSAGE))
        os.close(read)


def _become(told: dict[str, Any], streams: Sequence[int]) -> Sequence[str]:
    if told["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    tempfile.tempdir = None  # found anew, from its own TMPDIR
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text stream of the interpreter's own
    return list(told["arguments"])


def _run(arguments: Sequence[str]) -> int:
    """What the interpreter does with these. Returns the exit status, that of a signal negative."""
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = [arguments[1], *arguments[2:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException as fault:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(fault, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> None:
    """End as the interpreter does, but not take apart all that was imported: ten times what a server's start costs."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            output.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    with suppress(KeyboardInterrupt), closing(socket.socket(fileno=int(sys.argv[1]))) as control:
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()
        arguments = _next_program(control)
    _end(0 if arguments is None else _run(arguments))


if __name__ == "__main__":
    main()
