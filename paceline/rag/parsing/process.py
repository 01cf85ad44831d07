"""Documents as read: the result and the rules of its name; texts that are read here; and the parser processes as their
users see them, started when needed, killed at any limit, their answers checked, a few of them behind futures.

See `worker` for what a process does: one document at a time, so that several processes parse several.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn, Self

import msgspec

import paceline
from paceline.core.printable import printable
from paceline.errors import ConfigError, DocumentError, ParserLost, RequestError
from paceline.rag.parsing.kinds import (
    EMPTY,
    MAX_PAGES,
    MAX_REASON,
    MAX_TEXT_BYTES,
    MAX_TITLE,
    Kind,
    Limits,
    kind_of,
)
from paceline.rag.parsing.readers.content import FailureCode, UnreadableError, kind_by_content
from paceline.rag.parsing.readers.text import read_text, title_of
from paceline.system import Threads, signal_group

MAX_NAME = 255  # characters; the limit of file systems
_PLAIN: frozenset[Kind] = frozenset({"text", "markdown", "code", "log"})  # which no library reads
_PLAIN_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Parsed:
    """One document as read. `text` has LF line ends and includes the title line."""

    name: str  # file name, or path relative to the given folder, with "/"
    title: str  # "" when it has none
    text: str
    sha256: str  # hex, of the UTF-8 of `text`: line ends do not change it
    kind: Kind = "markdown"
    pages: tuple[int, ...] = ()  # where each page begins in `text`, in characters; empty where there are none


def parsed(name: str, title: str, text: str, kind: Kind, pages: tuple[int, ...] = ()) -> Parsed:
    return Parsed(name, title, text, hashlib.sha256(text.encode()).hexdigest(), kind, pages)


def check_name(name: str) -> None:
    """Raise DocumentError for a misleading document name. Names are shown to users and never used as paths."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise DocumentError(
            f"{name[:MAX_NAME]!r} cannot name a document: use 1 to {MAX_NAME} printable characters, so rename the file."
        )
    if name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise DocumentError(f"{name!r} cannot name a document: give a plain name such as notes.md.")


def parsed_text(name: str, text: str) -> Parsed:
    """Raises DocumentError when it cannot be a document."""
    check_name(name)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise DocumentError(f"{name} is not UTF-8: its character {error.start} is half of a surrogate pair.") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise DocumentError(f"{name} is larger than {MAX_TEXT_BYTES >> 20} MiB; split it into smaller texts.")
    if "\0" in text:
        raise DocumentError(f"{name} looks like a binary file; give a text.")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"{name} {EMPTY}.")
    kind: Kind = "code" if kind_of(name) == "code" else "markdown"
    return parsed(name, title_of(name, text), text, kind)


def plain_text(name: str, document: BinaryIO) -> Parsed | None:
    """A small text in UTF-8, read as its parser would; None for every other file, and for what cannot be read."""
    kind = kind_of(name)
    if kind not in _PLAIN:
        return None
    try:
        document.seek(0)
        data = document.read(_PLAIN_BYTES + 1)
        # Before its kind is looked for: what has no zeros is no archive, of which parts would be unpacked here.
        if len(data) > _PLAIN_BYTES or b"\0" in data or kind_by_content(data, kind) != kind:
            return None
        data.decode()  # an older character set is guessed by a library
        content = read_text(data, name)
    except (UnreadableError, UnicodeDecodeError, OSError):
        return None
    check_name(name)
    return parsed(name, printable(content.title).strip(), content.text, kind)


# ---- parser processes -----------------------------------------------------------------------------------------------
_START_S = 60.0  # for a new process to say that it is there
_GRACE_S = 30.0  # beyond the limit at which the kernel ends a parser
_MAX_HEAD = 32 * (MAX_PAGES + 100)  # bytes of an answer before the text
_READ = 1 << 20  # bytes at a time
_MAX_MESSAGE = 4096  # bytes
# Signals that end a parser; 0 is none. A system has those that it knows.
_TIMES = {getattr(signal, name, -1) for name in ("SIGXCPU", "SIGALRM")}
_FROM_OUTSIDE = {getattr(signal, name, -1) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")}  # or short of memory

_logger = logging.getLogger("paceline.rag")


class _Hello(msgspec.Struct):
    """What the machine does not let be taken from the process."""

    network: bool
    files: bool


class _Ended(msgspec.Struct):
    signal: Annotated[int, msgspec.Meta(ge=0, le=64)]
    cpu_s: Annotated[float, msgspec.Meta(ge=0)]
    errno: int = 0  # why it could not be started


class _Head(msgspec.Struct):
    """The line before the text, of a document that was or was not read."""

    title: str = ""
    kind: Kind = "markdown"
    pages: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PAGES)] = ()
    size: int = -1
    reason: str = ""
    code: FailureCode = "invalid_file"


class ParserProcess:
    """Starts with the first document; after a limit or a kill, anew with the next one. Context manager.

    `parse` is for one thread at a time; `kill` may be called by any.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._guard = threading.Lock()  # of the process's end: only one that has not been waited for may be killed
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_killed = False
        self.cpu_s = 0.0  # what the last document took; its limit where the process was lost
        # Where the machine does not let it be taken away; None: not known yet.
        self.has_network: bool | None = None
        self.has_files: bool | None = None  # those that the program's user may read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the running process, which also leads a process group of that number."""
        return None if self._process is None else self._process.pid

    def parse(self, name: str, document: BinaryIO) -> Parsed:
        """Parse an open file, whose name tells its kind unless its content tells otherwise.

        Raises DocumentError when it cannot be a document; ParserLost when the process was killed from outside; OSError
        where the system gives none.
        """
        check_name(name)
        self.cpu_s = 0.0
        limits = self._limits.for_size(os.fstat(document.fileno()).st_size)
        try:
            answer, end = (self._exchange if can_fork() else self._exchange_alone)(name, document, limits)
        except BaseException:
            self.close()
            raise
        if end is None or (signal_number := end.signal) in _FROM_OUTSIDE:
            self.close()
            raise ParserLost(f"The process that read {name} was killed; try again, with more free memory.")
        if end.errno:
            raise OSError(end.errno, os.strerror(end.errno))
        if signal_number in _TIMES:
            _refuse(name, f"takes too long to be read, more than {limits.cpu_s} s; split it, or convert it to text")
        if signal_number:
            how = "it is damaged or needs too much memory; split it, or convert it to another kind"
            _refuse(name, f"ends the program that reads it (signal {signal_number}): {how}")
        line, _, text = answer.partition(b"\n")
        return _checked(name, line, text)

    def parse_bytes(self, name: str, data: bytes) -> Parsed:
        """Parse bytes in memory. Raises as `parse` does."""
        with memory_file(data) as document:
            return self.parse(name, document)

    def kill(self) -> None:
        """End the process for good; a `parse` under way, and every later one, raises ParserLost."""
        with self._guard:
            self._is_killed = True
            self._end_group()

    def close(self) -> None:
        """End the process and forget it. The next `parse` starts another."""
        with self._guard:
            self._end_group()
            process, control = self._process, self._control
            self._process = self._control = None
            if process is not None:
                process.wait()
        if control is not None:
            control.close()

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _end_group(self) -> None:
        if self._process is not None and self._process.returncode is None:
            signal_group(self._process, kill=True)

    def _started(self) -> socket.socket:
        """The control socket of a running process. Raises OSError or ConfigError when there can be none."""
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                process = _worker(theirs.fileno(), subprocess.DEVNULL)
            except BaseException:
                ours.close()
                raise
        self._control = ours
        self._keep(process)
        ours.settimeout(_START_S)
        try:
            hello = _message(ours)
        except TimeoutError:
            hello = b""
        if self._is_killed:
            raise ParserLost("The process that reads documents was stopped.")
        if not hello:
            raise ConfigError("The process that reads documents could not be started: install paceline again.")
        self._heard(msgspec.json.decode(hello, type=_Hello))
        return ours

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        with self._guard:
            self._process = process
            if self._is_killed:
                self._end_group()

    def _heard(self, said: _Hello) -> None:
        if self.has_network is not None:
            return
        self.has_network, self.has_files = said.network, said.files
        if said.network:
            _logger.warning("this machine does not let documents be read without access to the network")
        if said.files:
            _logger.info("this machine does not let documents be read without access to the user's files")

    def _exchange(self, name: str, document: BinaryIO, limits: Limits) -> tuple[bytes, _Ended | None]:
        """The answer, and how the parser ended; None where its whole process is gone."""
        control = self._started()
        reading, writing = os.pipe()
        try:
            try:
                asked = msgspec.json.encode({"name": name, "limits": limits}) + b"\n"
                socket.send_fds(control, [asked], [document.fileno(), writing])
            except (BrokenPipeError, ConnectionResetError):
                return b"", None
            finally:
                os.close(writing)
            self.cpu_s = float(limits.cpu_s)
            deadline = time.monotonic() + limits.wall_s + _GRACE_S
            answer = b"".join(_read(reading, deadline))
        finally:
            os.close(reading)
        if len(answer) > _MAX_HEAD + MAX_TEXT_BYTES:
            self.close()
            _refuse(name, "makes its reader write too much; convert it to text")
        control.settimeout(max(1.0, deadline - time.monotonic()))
        try:
            said = _message(control)
        except (TimeoutError, ConnectionResetError):
            said = b""
        if not said:
            return answer, None
        ended = msgspec.json.decode(said, type=_Ended)
        self.cpu_s = ended.cpu_s
        return answer, ended

    def _exchange_alone(self, name: str, document: BinaryIO, limits: Limits) -> tuple[bytes, _Ended | None]:
        """As `_exchange`, by a process for this document alone, which ends at the limit of time and has no other."""
        document.seek(0)
        began = time.monotonic()
        process = _worker(document.fileno(), subprocess.PIPE, name, msgspec.json.encode(limits).decode())
        self._keep(process)
        self._heard(_Hello(network=True, files=True))
        late = threading.Timer(limits.wall_s + _START_S, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            with process.stdout as stream:
                answer = stream.read(_MAX_HEAD + MAX_TEXT_BYTES + 1)
            if len(answer) > _MAX_HEAD + MAX_TEXT_BYTES:
                _refuse(name, "makes its reader write too much; convert it to text")
            code = process.wait()
        finally:
            late.cancel()
            self.cpu_s = time.monotonic() - began
        if code and self.cpu_s >= limits.wall_s:
            _refuse(name, f"takes too long to be read, more than {limits.wall_s} s; split it, or convert it to text")
        return answer, None if code else _Ended(0, self.cpu_s)


def memory_file(data: bytes) -> BinaryIO:
    """An open file in memory that holds these bytes."""
    document: BinaryIO
    if hasattr(os, "memfd_create"):
        document = os.fdopen(os.memfd_create("document"), "w+b")
    else:
        document = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    document.write(data)
    document.flush()
    return document


def can_fork() -> bool:
    """One process can parse document after document, each in a child that it forks: on every system but Windows."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds")


def _worker(stdin: int, stdout: int, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.rag.parsing.worker", *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_environment(),
        start_new_session=True,  # a group of its own, to be killed together; no keyboard's signals
    )


def _message(control: socket.socket) -> bytes:
    """The next line; empty where the other end is gone, or sends none that is short enough."""
    line = b""
    while not line.endswith(b"\n"):
        part = control.recv(_MAX_MESSAGE - len(line)) if len(line) < _MAX_MESSAGE else b""
        if not part:
            return b""
        line += part
    return line


def _read(descriptor: int, deadline: float) -> Iterator[bytes]:
    """What is written to a pipe until all writers are gone, the deadline has passed, or it is more than allowed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    left = _MAX_HEAD + MAX_TEXT_BYTES + 1
    while left > 0 and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(descriptor, min(left, _READ))
        if not part:
            return
        left -= len(part)
        yield part


def _checked(name: str, line: bytes, rest: bytes) -> Parsed:
    """The document in an answer: its first line, and the rest. Raises DocumentError for a refusal, and for anything
    that is no answer."""
    try:
        head = msgspec.json.decode(line, type=_Head)
        text = rest.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        _refuse(name, "ends the program that reads it; convert it to another kind")
    if head.reason:
        _refuse(name, printable(head.reason).strip()[:MAX_REASON], head.code)
    if len(rest) != head.size or not text.strip():
        _refuse(name, "has no text that can be read; convert it to text")
    pages = head.pages
    if any(later < earlier for earlier, later in zip((0, *pages), (*pages, len(text)), strict=True)):
        pages = ()
    return parsed(name, printable(head.title).strip()[:MAX_TITLE], text, head.kind, pages)


def _refuse(name: str, reason: str, code: FailureCode = "invalid_file") -> NoReturn:
    raise DocumentError(f"{name} {reason}.", code=code, empty=reason == EMPTY)


def _environment() -> dict[str, str]:
    """Variables of the process: the paths that this one imports from, and nothing that may be secret."""
    root = str(Path(paceline.__file__).parents[1])
    paths = [root, *(path for path in sys.path if Path(path).is_absolute())]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "LC_ALL": "C.UTF-8",
        "OMP_THREAD_LIMIT": "1",  # of Tesseract: a parser may start no thread
    }


# ---- several --------------------------------------------------------------------------------------------------------
NUM_PARSERS = 2  # documents parsed at once
BUDGET_S, WINDOW_S = 600.0, 3600.0  # processor seconds that the documents of one key may take in an hour

Around = Callable[[], AbstractContextManager[None]]


class ParserBudget:
    """Processor seconds of each owner's documents, counted anew an hour after the first; the owner "" has no limit. May
    be shared by pools and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, float]] = {}  # by owner: (until when it counts, seconds)

    def check(self, owner: str) -> None:
        """Raises RequestError (429) where this owner's seconds are used up; what is being parsed does not count yet."""
        with self._lock:
            until, used = self._used.get(owner, (0.0, 0.0))
            left = until - time.monotonic()
        if left > 0 and used >= BUDGET_S:
            raise RequestError(
                f"Reading this key's files has taken {BUDGET_S:g} s of processor time, which is all that a key has in "
                f"an hour: send or attach this one again in {math.ceil(left / 60)} min.",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=math.ceil(left),
            )

    def spend(self, owner: str, seconds: float) -> None:
        if not owner:
            return
        with self._lock:
            now = time.monotonic()
            self._used = {each: one for each, one in self._used.items() if one[0] > now}
            until, used = self._used.get(owner, (now + WINDOW_S, 0.0))
            self._used[owner] = until, used + seconds


class ParserPool:
    """Processes start when they are needed, and end at `rest` and `close`."""

    def __init__(
        self, num_parsers: int = NUM_PARSERS, limits: Limits | None = None, budget: ParserBudget | None = None
    ) -> None:
        """budget: of the owners that documents are submitted for."""
        self._limits = limits
        self._budget = budget or ParserBudget()
        self._threads = Threads(num_parsers, "paceline-parse")
        self._lock = threading.Lock()
        self._idle: list[ParserProcess] = []
        self._busy: set[ParserProcess] = set()
        self._closed = False

    def submit(
        self, name: str, open_document: Callable[[], BinaryIO], around: Around = nullcontext, *, owner: str = ""
    ) -> Future[Parsed]:
        """Parse a file; a small plain text without a process. around: entered by the thread that waits for the parser,
        and starts it if it has to. owner: whose budget it takes from. The future raises as `ParserProcess.parse` and
        `ParserBudget.check` do, or what opening the file does."""
        with self._lock:
            if not self._closed:
                return self._threads.submit(self._parse, name, open_document, around, owner)
        future: Future[Parsed] = Future()
        future.set_exception(_stopping(name))
        return future

    def rest(self) -> None:
        """End the processes that have nothing to do."""
        with self._lock:
            idle, self._idle = self._idle, []
        for parser in idle:
            parser.close()

    def close(self) -> None:
        """End all processes, busy or not. What they were parsing raises ParserLost."""
        with self._lock:
            self._closed = True
            for parser in self._busy:
                parser.kill()
        self._threads.shutdown(wait=True)
        self.rest()

    def _parse(self, name: str, open_document: Callable[[], BinaryIO], around: Around, owner: str) -> Parsed:
        self._budget.check(owner)
        with open_document() as document, around():
            return plain_text(name, document) or self._parse_apart(name, document, owner)

    def _parse_apart(self, name: str, document: BinaryIO, owner: str) -> Parsed:
        with self._lock:
            if self._closed:
                raise _stopping(name)
            parser = self._idle.pop() if self._idle else ParserProcess(self._limits)
            self._busy.add(parser)
        try:
            return parser.parse(name, document)
        finally:
            self._budget.spend(owner, parser.cpu_s)
            with self._lock:
                self._busy.discard(parser)
                self._idle.append(parser)


def _stopping(name: str) -> ParserLost:
    return ParserLost(f"{name} is not read, since the program is stopping.")
