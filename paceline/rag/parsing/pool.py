"""A few parser processes behind futures, for a caller that has other work meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO

from paceline.errors import ParserLost, RequestError
from paceline.rag.parsing.kinds import Limits
from paceline.rag.parsing.parsed import Parsed
from paceline.rag.parsing.process import ParserProcess

NUM_PARSERS = 2  # documents parsed at once
BUDGET_S, WINDOW_S = 600.0, 3600.0  # processor seconds that the documents of one key may take in an hour

Around = Callable[[], AbstractContextManager[None]]


class ParserBudget:
    """Processor seconds of each owner's documents, counted anew an hour after the first; the owner "" has no limit. May
    be shared by pools and threads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, float]] = {}  # by owner: (until when it counts, seconds)

    def check(self, owner: str) -> None:
        """Raises RequestError (429) where this owner's seconds are used up; what is being parsed does not count yet."""
        with self._lock:
            until, used = self._used.get(owner, (0.0, 0.0))
            left = until - self._now()
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
            now = self._now()
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
        self._threads = ThreadPoolExecutor(num_parsers, thread_name_prefix="paceline-parse")
        self._lock = threading.Lock()
        self._idle: list[ParserProcess] = []
        self._busy: set[ParserProcess] = set()
        self._closed = False

    def submit(
        self, name: str, open_document: Callable[[], BinaryIO], around: Around = nullcontext, *, owner: str = ""
    ) -> Future[Parsed]:
        """Parse a file. around: entered by the thread that waits for the parser, and starts it if it has to. owner:
        whose budget it takes from. The future raises as `ParserProcess.parse` and `ParserBudget.check` do, or what
        opening the file does."""
        with self._lock:
            if not self._closed:
                return self._threads.submit(self._parse, name, open_document, around, owner)
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

    def _parse(self, name: str, open_document: Callable[[], BinaryIO], around: Around, owner: str) -> Parsed:
        self._budget.check(owner)
        with open_document() as document, around():
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
