"""A few parser processes behind futures, for a caller that has other work meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO

from paceline.errors import ParserLost
from paceline.rag.parsing.kinds import Limits
from paceline.rag.parsing.parsed import Parsed
from paceline.rag.parsing.process import ParserProcess

NUM_PARSERS = 2  # documents parsed at once

Around = Callable[[], AbstractContextManager[None]]


class ParserPool:
    """Processes start when they are needed, and end at `rest` and `close`."""

    def __init__(self, num_parsers: int = NUM_PARSERS, limits: Limits | None = None) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(num_parsers, thread_name_prefix="paceline-parse")
        self._lock = threading.Lock()
        self._idle: list[ParserProcess] = []
        self._busy: set[ParserProcess] = set()
        self._closed = False

    def submit(self, name: str, open_document: Callable[[], BinaryIO], around: Around = nullcontext) -> Future[Parsed]:
        """Parse a file. around: entered by the thread that waits for the parser, and starts it if it has to. The future
        raises as `ParserProcess.parse` does, or what opening the file does."""
        with self._lock:
            if not self._closed:
                return self._threads.submit(self._parse, name, open_document, around)
        future: Future[Parsed] = Future()
        future.set_exception(_stopping(name))
        return future

    def pids(self) -> list[int]:
        """Of the processes that are parsing."""
        with self._lock:
            return [parser.pid for parser in self._busy if parser.pid is not None]

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

    def _parse(self, name: str, open_document: Callable[[], BinaryIO], around: Around) -> Parsed:
        with open_document() as document, around():
            with self._lock:
                if self._closed:
                    raise _stopping(name)
                parser = self._idle.pop() if self._idle else ParserProcess(self._limits)
                self._busy.add(parser)
            try:
                return parser.parse(name, document)
            finally:
                with self._lock:
                    self._busy.discard(parser)
                    self._idle.append(parser)


def _stopping(name: str) -> ParserLost:
    return ParserLost(f"{name} is not read, since the program is stopping.")
