"""The log of what a cloud asked a device, for the device's owner: questions, documents read, bytes sent, outcome.

A SQLite file that other processes may read at any time. An entry is on disk before a document is read for it, so that
no crash hides a reading. Holds no text of documents. Bounded: entries older than `MAX_AGE_S` go, and beyond
`MAX_ENTRIES` the oldest; refused questions have a bound of their own, so that a flood of them pushes out no entry of a
reading. Methods block for a disk access and may be called from any thread.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.core.printable import printable
from paceline.sqlite import connect, prepare, speaking, transaction

FILE = "asking.sqlite"
MAX_AGE_S = 90 * 86_400.0
MAX_ENTRIES = 20_000  # of readings, and as many of refusals; an entry has 2 KiB at most
MAX_QUESTION = 1000  # characters
REFUSED = "refused: "
_TRIM_EVERY = 256  # entries between two deletions of old ones
_VERSION = 1  # PRAGMA user_version
_SCHEMA = (
    """CREATE TABLE questions (
        id INTEGER PRIMARY KEY,
        began REAL NOT NULL,  -- s since 1970
        asker TEXT NOT NULL,  -- name of the key, as the cloud says
        question TEXT NOT NULL,
        privacy TEXT NOT NULL,
        refused INTEGER NOT NULL,
        times INTEGER NOT NULL,  -- refusals for one reason and key within a minute are one entry
        documents TEXT NOT NULL,  -- ids, as JSON
        sent TEXT NOT NULL,  -- bytes by kind of message, as JSON
        tokens INTEGER NOT NULL,
        outcome TEXT  -- NULL: under way
    )""",
    "CREATE INDEX questions_began ON questions (refused, began)",
    "CREATE TABLE answers (cloud TEXT PRIMARY KEY, may_ask TEXT NOT NULL) WITHOUT ROWID",  # see `EnrolmentAnswers`
)
_COLUMNS = "id, began, asker, question, privacy, refused, times, documents, sent, tokens, outcome"


@dataclass(frozen=True, slots=True)
class Question:
    """A question as the cloud asked it."""

    asker: str
    text: str
    privacy: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusals of one kind, the first of them in full."""

    question: Question
    reason: str
    times: int
    entry: int | None = None  # the entry to which they are added; None: a new one


@dataclass(frozen=True, slots=True)
class Activity:
    """An entry of the log."""

    began: float  # s since 1970
    asker: str
    question: str
    privacy: str
    refused: bool
    times: int
    documents: tuple[str, ...]  # ids, as `paceline docs list` shows them
    sent: Mapping[str, int]  # bytes to the cloud by kind of message
    tokens: int  # of the answer, as far as this device knows it
    outcome: str | None  # None: under way


def open_file(path: Path) -> sqlite3.Connection:
    """Raises ConfigError for a file of another format, and as `paceline.sqlite.connect`."""
    rows = connect(path)
    try:
        prepare(rows, path, _VERSION, _SCHEMA, "remove the file: what was asked is forgotten, and who may ask")
    except BaseException:
        rows.close()
        raise
    return rows


class ActivityLog:
    """The log in a state directory. Raises ConfigError when its file cannot be used."""

    def __init__(self, state_dir: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path = state_dir / FILE
        self._now = now
        self._lock = threading.Lock()
        self._written = 0
        with self._speaking():
            self._rows = open_file(self.path)

    def close(self) -> None:
        with self._lock:
            self._rows.close()

    # ---- writing ----------------------------------------------------------------------------------------------------
    def recover(self) -> None:
        """Mark the entries that an earlier run of the program left under way."""
        self._write("UPDATE questions SET outcome = 'the program ended' WHERE outcome IS NULL")

    def begin(self, question: Question) -> int:
        """Write an entry for a question whose documents are about to be read. Returns its id."""
        with self._changing():
            return self._insert(question, None)

    def refuse(self, refusals: Sequence[Refusal]) -> list[int]:
        """Write refusals: new entries, or more times for those that have one. Returns their entries."""
        with self._changing():
            return [self._refuse(refusal) for refusal in refusals]

    def _refuse(self, refusal: Refusal) -> int:
        entry, more = refusal.entry, refusal.times
        if entry is None:
            entry, more = self._insert(refusal.question, REFUSED + refusal.reason), refusal.times - 1
        if more:
            self._rows.execute("UPDATE questions SET times = times + ? WHERE id = ?", (more, entry))
        return entry

    def read(self, entry: int, documents: Sequence[str]) -> None:
        """Note the ids of the documents that an answer reads."""
        self._write("UPDATE questions SET documents = ? WHERE id = ?", json.dumps(list(documents)), entry)

    def end(self, entry: int, outcome: str, sent: Mapping[str, int], tokens: int) -> None:
        self._write(
            "UPDATE questions SET outcome = ?, sent = ?, tokens = ? WHERE id = ?",
            outcome,
            json.dumps(dict(sent)),
            tokens,
            entry,
        )

    def _insert(self, question: Question, outcome: str | None) -> int:
        if self._written % _TRIM_EVERY == 0:
            self._trim()
        self._written += 1
        done = self._rows.execute(
            "INSERT INTO questions (began, asker, question, privacy, refused, times, documents, sent, tokens, outcome) "
            "VALUES (?, ?, ?, ?, ?, 1, '[]', '{}', 0, ?)",
            (
                self._now(),
                printable(question.asker),
                printable(question.text)[:MAX_QUESTION],
                question.privacy,
                outcome is not None,
                outcome,
            ),
        )
        assert done.lastrowid is not None, "an insertion has an id"
        return done.lastrowid

    def _trim(self) -> None:
        self._rows.execute("DELETE FROM questions WHERE began < ?", (self._now() - MAX_AGE_S,))
        for refused in (False, True):
            self._rows.execute(
                "DELETE FROM questions WHERE refused = ? AND id <= (SELECT id FROM questions WHERE refused = ? "
                "ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (refused, refused, MAX_ENTRIES - _TRIM_EVERY),
            )

    def _write(self, statement: str, *values: object) -> None:
        with self._lock, self._speaking():
            self._rows.execute(statement, values)

    # ---- reading ----------------------------------------------------------------------------------------------------
    def recent(self, count: int) -> list[Activity]:
        """The newest entries, oldest first."""
        with self._lock, self._speaking():
            rows = self._rows.execute(f"SELECT {_COLUMNS} FROM questions ORDER BY id DESC LIMIT ?", (count,)).fetchall()
        return [_activity(row) for row in reversed(rows)]

    def admitted_since(self, moment: float) -> list[float]:
        """Times of the questions admitted since then, in s since 1970."""
        with self._lock, self._speaking():
            found = self._rows.execute(
                "SELECT began FROM questions WHERE refused = FALSE AND began > ? ORDER BY began", (moment,)
            )
            return [began for (began,) in found]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock, self._speaking(), transaction(self._rows):
            yield

    def _speaking(self) -> AbstractContextManager[None]:
        return speaking(self.path, "an activity log")


def _activity(row: tuple[int, float, str, str, str, int, int, str, str, int, str | None]) -> Activity:
    _, began, asker, question, privacy, refused, times, documents, sent, tokens, outcome = row
    return Activity(
        began,
        asker,
        question,
        privacy,
        bool(refused),
        times,
        tuple(json.loads(documents)),
        json.loads(sent),
        tokens,
        outcome,
    )
