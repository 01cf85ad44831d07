"""Refused questions on their way to the activity log: those of one minute, reason and key become one entry.

A cloud may send thousands a second. What is kept of them, and the disk accesses, do not grow with their number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.runtime.asking.activity import ActivityLog, Question, Refusal

log = logging.getLogger("paceline.asking")

MINUTE_S = 60.0
MAX_KINDS = 16  # a minute; further ones share an entry
_OTHERS = "for further reasons, or of further keys"

_Kind = tuple[int, str, str]  # minute, reason, key


class Refusals:
    """`add` belongs to the event loop; what is pending is written on the writer's thread, all at once."""

    def __init__(self, activity: ActivityLog, submit: Callable[[Callable[[], None]], object]) -> None:
        """submit: runs a function on the writer's thread, after those before it."""
        self._activity = activity
        self._submit = submit
        self._lock = threading.Lock()  # of the two below
        self._pending: dict[_Kind, Refusal] = {}
        self._submitted = False  # a writing of them
        self._kinds: set[_Kind] = set()  # of the newest minute; the event loop's
        self._entries: dict[_Kind, int] = {}  # of the newest minute; the writer's

    def add(self, question: Question, reason: str, now: float) -> None:
        """Note one refusal. now: s."""
        kind = int(now // MINUTE_S), reason, question.asker
        self._kinds = {each for each in self._kinds if each[0] == kind[0]}
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            reason = _OTHERS
            kind = kind[0], reason, ""
        self._kinds.add(kind)
        with self._lock:
            waiting = self._pending.get(kind)
            times = 1 if waiting is None else waiting.times + 1
            self._pending[kind] = replace(waiting or Refusal(question, reason, 0), times=times)
            submits, self._submitted = not self._submitted, True
        if submits:
            self._submit(self._write)

    def _write(self) -> None:
        with self._lock:
            pending, self._pending, self._submitted = self._pending, {}, False
        refusals = [replace(refusal, entry=self._entries.get(kind)) for kind, refusal in pending.items()]
        newest = max(minute for minute, _, _ in pending)
        try:
            written = dict(zip(pending, self._activity.refuse(refusals), strict=True))
        except PacelineError as error:
            log.error("the activity log is not complete: %s", error)
            return
        self._entries = {kind: entry for kind, entry in (self._entries | written).items() if kind[0] == newest}
