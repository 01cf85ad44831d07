"""The parser process: `python -m paceline.rag.parsing.worker`, with a Unix socket as standard input.

For a document it receives a line, `{"name", "limits"}`, with two descriptors: the document and a pipe for the
answer. It imports the reader and forks; the child takes limits on itself, parses, writes the answer and ends, so no
document meets what another left in memory. Then it reports how the child ended, and what processor time it took. It
ends with its socket. With a name and limits as arguments it parses one document, its standard input, and answers on
standard output: for systems that cannot fork.

An answer is a line of JSON, `{"title", "kind", "pages", "size"}` or `{"reason", "code"}`, and the text of that size.
Its user (`process`) believes none of it without a check.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from paceline.rag.parsing import sandbox
from paceline.rag.parsing.kinds import EMPTY, MAX_FILE_BYTES, MAX_REASON, MAX_TEXT_BYTES, Kind, Limits, kind_of
from paceline.rag.parsing.readers import missing_library, reader
from paceline.rag.parsing.readers.content import FailureCode, ReadText, UnreadableError, kind_by_content, too_long

_MAX_MESSAGE = 4096  # bytes
_READ = 1 << 20  # bytes at a time
_LOOK_MS = 20  # between looks at a child that cannot be waited for


def main() -> None:
    control = socket.socket(fileno=0)
    # The files last: what is left of their rights would not suffice to make the namespace of the network.
    left = {"network": not sandbox.isolate(), "files": not sandbox.hide_files()}
    _send(control, left)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 2)
        if not message:
            return
        while not message.endswith(b"\n"):
            message += control.recv(_MAX_MESSAGE)
        asked = json.loads(message)
        name, limits = asked["name"], Limits(**asked["limits"])
        with suppress(UnreadableError):  # the child says which library is missing
            reader(kind_of(name) or "markdown")  # imported here, so that children do not have to
        refused = 0
        try:
            child = os.fork()
        except OSError as error:  # the machine gives no process now
            child, refused = -1, error.errno or errno.EAGAIN
        if child == 0:
            _parse_and_end(control, name, limits, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if refused:
            _send(control, {"signal": 0, "cpu_s": 0.0, "errno": refused})
            continue
        ended = _ended(child, control)
        if ended is None:
            return
        status, cpu_s = ended
        signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        _send(control, {"signal": signal_number, "cpu_s": cpu_s})


def once(name: str, limits: Limits) -> None:
    sandbox.isolate()
    sandbox.hide_files()
    with suppress(UnreadableError):
        reader(kind_of(name) or "markdown")
    _write(1, _answer(name, limits, 0, sandbox.limit(limits)))


def _send(control: socket.socket, message: Mapping[str, object]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _ended(child: int, control: socket.socket) -> tuple[int, float] | None:
    """Wait for the child; its wait status and processor seconds. None: this process's user is gone, and so is the
    child."""
    poll = select.poll()
    poll.register(control, 0)  # hang-ups only
    watched = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None  # of Linux
    if watched is not None:
        poll.register(watched, select.POLLIN)
    while True:
        found = [descriptor for descriptor, _ in poll.poll(None if watched is not None else _LOOK_MS)]
        if control.fileno() in found and watched not in found:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            if watched is not None:
                os.close(watched)
            return status, used.ru_utime + used.ru_stime


def _parse_and_end(control: socket.socket, name: str, limits: Limits, document: int, answer: int) -> NoReturn:
    """Parse the document, answer, and end this process without what Python does at exits."""
    try:
        control.close()
        _write(answer, _answer(name, limits, document, sandbox.limit(limits)))
        os._exit(0)
    finally:
        os._exit(1)


def _answer(name: str, limits: Limits, document: int, spare: mmap.mmap) -> bytes:
    try:
        return _success(*_parse(name, _contents(document)))
    except UnreadableError as error:
        return _failure(error.reason, error.code)
    except MemoryError:
        spare.close()
        return _failure(
            f"needs more than {limits.memory_bytes >> 20} MiB of memory to be read; split it, or convert it to text",
            "invalid_file",
        )
    except ImportError as error:
        missing = missing_library(error)
        return _failure(missing.reason, missing.code)
    except Exception as error:  # any, from a damaged document
        return _failure(
            f"is damaged or not what its name says ({type(error).__name__}); open it and save it again", "invalid_file"
        )


def _parse(name: str, data: bytes) -> tuple[ReadText, Kind]:
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableError(
            f"is larger than {MAX_FILE_BYTES // 2**20} MiB; split it into smaller files", "invalid_file"
        )
    kind = kind_by_content(data, kind_of(name))
    content = reader(kind)(data, name)
    if not content.text.strip():
        raise UnreadableError(EMPTY)
    return content, kind


def _contents(document: int) -> bytes:
    """The document from its beginning, and not more than one byte above MAX_FILE_BYTES."""
    os.lseek(document, 0, os.SEEK_SET)
    parts: list[bytes] = []
    left = MAX_FILE_BYTES + 1
    while left and (part := os.read(document, min(left, _READ))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _success(content: ReadText, kind: Kind) -> bytes:
    text = content.text.encode("utf-8", "replace")
    if len(text) > MAX_TEXT_BYTES:
        raise too_long()
    title = content.title.encode("utf-8", "replace").decode()
    head = {"title": title, "kind": kind, "pages": list(content.pages), "size": len(text)}
    return json.dumps(head).encode() + b"\n" + text


def _failure(reason: str, code: FailureCode) -> bytes:
    return json.dumps({"reason": reason[:MAX_REASON], "code": code}).encode() + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_READ]) :]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        once(sys.argv[1], Limits(**json.loads(sys.argv[2])))
    else:
        main()
