"""The log: what strangers say forges no line of it, and what they cause does not fill a disk.

Every line goes through `OneLine`, whoever wrote it, so that no caller has to think of it. uvicorn logs every request
beyond its limit, and asyncio every `accept` of a backlog when descriptors run out: of those one line a minute is left.
Lines are written at once and in order by whoever logs, who does not wait for a reader that reads nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import sys
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from paceline.api.observation import request_id
from paceline.core.printable import printable
from paceline.errors import AT_LIMITS, is_exhausted

PAUSE_S = 60.0
_MAX_MESSAGES = 256  # remembered at once

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_WAITING = 1 << 20  # bytes of lines that nobody has read yet; half of it is read before more are kept
READER_S = 0.1  # wait for a reader that is behind, once
END_S = 1.0  # wait for it at the end of the program
_INDENT = "    "  # of a traceback, so that no line of it passes for one of the log

_log = logging.getLogger("paceline.api")


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    """Log to stderr; of uvicorn and httpx warnings only, of mcp errors. What other packages say at DEBUG is left out
    at any level: sse-starlette writes down every piece of an answer, and HTTP clients headers."""
    # A system without PIPE_BUF (Windows) cannot say beforehand whether a write waits. Where stderr was closed at the
    # start, what has its number now is another file.
    writes_ahead = hasattr(select, "PIPE_BUF") and sys.stderr is not None
    handler = Unhindered() if writes_ahead else logging.StreamHandler()
    handler.setFormatter(OneLine(_FORMAT) if form == "text" else OneObject())
    handler.addFilter(_is_told_briefly)
    logging.basicConfig(level=max(logging.INFO, logging.getLevelNamesMapping()[level.upper()]), handlers=[handler])
    logging.getLogger("paceline").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(Seldom())
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("mcp").setLevel(logging.ERROR)


class Unhindered(logging.Handler):
    """Writes to stderr what it takes without waiting, and the rest before a later line or at the end: a pipe that
    nobody reads holds up no answer. Lines beyond `MAX_WAITING` are lost and counted."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = bytearray()
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:  # a call whose arguments do not fit its message
            self.handleError(record)
            return
        self._write(0.0)
        is_behind = bool(self._waiting)
        if len(self._waiting) > (MAX_WAITING // 2 if self._lost else MAX_WAITING):
            self._lost += 1
            return
        self._tell_lost()
        self._waiting += line
        self._write(0.0 if is_behind else READER_S)

    def flush(self) -> None:
        """Called at the end of the program."""
        self._tell_lost()
        self._write(END_S)

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _tell_lost(self) -> None:
        if self._lost:
            message = "%d lines of the log were lost, since nobody read them"
            told = logging.LogRecord(_log.name, logging.WARNING, "", 0, message, (self._lost,), None)
            self._lost = 0
            self._waiting += self._line(told)

    def _write(self, wait: float) -> None:
        """Write what can be written within so many seconds."""
        end = time.monotonic() + wait
        try:
            # A pipe that can be written to takes PIPE_BUF bytes, and a write of more would wait.
            while self._waiting and select.select((), (2,), (), max(0.0, end - time.monotonic()))[1]:
                del self._waiting[: os.write(2, self._waiting[: select.PIPE_BUF])]
        except BlockingIOError:  # somebody has set the terminal that they share so
            return
        except OSError:  # who read it is gone, or the disk is full
            self._waiting.clear()


class OneLine(logging.Formatter):
    """A record is one line of printable characters; the lines of its traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # as logging has it
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(  # noqa: N802  # as logging has it
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return "\n".join(_INDENT + printable(line) for line in super().formatException(ei).splitlines())


class OneObject(logging.Formatter):
    """A record is one JSON object on one line: `time`, `level`, `logger`, `message`, the `id` of the request that it is
    about where it is about one, what the record has as `fields`, and the `traceback` of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if about := getattr(record, "id", "") or request_id.get():
            said["id"] = about
        said |= {name: value for name, value in getattr(record, "fields", {}).items() if name not in said}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)  # all else than ASCII is escaped: nobody forges a line


def _is_told_briefly(record: logging.LogRecord) -> bool:
    """True. Where the machine is at its limits, the sentence that says so stands in place of a traceback, whoever has
    caught the error: there is one for each request, and all are alike."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and is_exhausted(error):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}. {AT_LIMITS}", (), None
    return True


def _is_news(record: logging.LogRecord) -> bool:
    """False for what uvicorn says of an answer that ends in its middle: it does so on purpose, and the line of its
    request says why."""
    return "without completing response" not in str(record.msg)


class Seldom(logging.Filter):
    """Lets each message of a logger through once in `PAUSE_S`; the next one says how many were left out. Errors with a
    traceback always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # message without its arguments: when it passed, left out since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or record.levelno < logging.WARNING:
            return True
        now, message = time.monotonic(), str(record.msg)
        passed, left_out = self._seen.get(message, (now - PAUSE_S, 0))
        if now - passed < PAUSE_S:
            self._seen[message] = passed, left_out + 1
            return False
        if len(self._seen) >= _MAX_MESSAGES:
            self._seen.clear()
        self._seen[message] = now, 0
        if left_out:
            record.msg = f"{message} ({left_out} more times since the last line)"
        return True


def quieten(loop: asyncio.AbstractEventLoop) -> None:
    """Log at most one line a minute when connections cannot be accepted for want of descriptors."""
    logger = logging.getLogger("paceline.api.accept")
    logger.addFilter(Seldom())

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept()" in str(context.get("message")):
            # With a message of its own for each error, so that another one is not left out.
            logger.error(f"connections wait, because none can be accepted: {context.get('exception')}")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
