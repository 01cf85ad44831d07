"""One line a minute where a log would have thousands: what strangers cause must not fill a disk.

uvicorn logs every request beyond its limit, and asyncio every `accept` of a backlog when descriptors run out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

PAUSE_S = 60.0
_MAX_MESSAGES = 256  # remembered at once

_log = logging.getLogger("paceline.api")


class Seldom(logging.Filter):
    """Lets each message of a logger through once in `PAUSE_S`; the next one says how many were left out. Errors with a
    traceback always pass."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[str, tuple[float, int]] = {}  # message without its arguments: when it passed, left out since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or record.levelno < logging.WARNING:
            return True
        now, message = self._now(), str(record.msg)
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
