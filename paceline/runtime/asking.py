"""Sessions that a cloud opens at a device, which read its private documents: who may, how often, and what was read.

The gate admits or refuses an opening and follows the session to its end; the log of all of them is the owner's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from paceline.core.printable import printable
from paceline.core.side import NOBODY, MayAsk
from paceline.errors import PacelineError
from paceline.rag.prompt import query_of
from paceline.runtime.sessions.driver import Egress
from paceline.settings import AgentSettings
from paceline.sql import OwnRows, SqlConnection, SqliteFile
from paceline.system import Threads
from paceline.wire.messages import REFUSED, OpenSession, SessionMessage, Targets

log = logging.getLogger("paceline.asking")

FILE = "asking.sqlite"
MAX_AGE_S = 90 * 86_400.0
MAX_ENTRIES = 20_000  # of readings, and as many of refusals; an entry has 2 KiB at most
MAX_QUESTION = 1000  # characters
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
    "CREATE TABLE answers (cloud TEXT PRIMARY KEY, may_ask TEXT NOT NULL) WITHOUT ROWID",  # see `answered_for`
)
_KIND = "an activity log"
_ADVICE = "remove the file: what was asked is forgotten, and who may ask"


@dataclass(frozen=True, slots=True)
class CloudQuestion:
    """A question as the cloud asked it."""

    asker: str
    text: str
    privacy: str


@dataclass(frozen=True, slots=True)
class Activity:
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


class ActivityLog:
    """The log of what a cloud asked a device, for the device's owner: questions, documents read, bytes sent, outcome.

    A SQLite file in the state directory that other processes may read at any time. An entry is on disk before a
    document is read for it, so that no crash hides a reading. Holds no text of documents. Bounded: entries older than
    `MAX_AGE_S` go, and beyond `MAX_ENTRIES` the oldest; refused questions have a bound of their own, so that a flood
    of them pushes out no entry of a reading. Methods block for a disk access and may be called from any thread.
    """

    def __init__(self, state_dir: Path) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._written = 0
        self._rows = _opened(state_dir)

    def close(self) -> None:
        self._rows.close()

    # ---- writing ----------------------------------------------------------------------------------------------------
    def recover(self) -> None:
        """Mark the entries that an earlier run of the program left under way."""
        self._write("UPDATE questions SET outcome = 'the program ended' WHERE outcome IS NULL")

    def begin(self, question: CloudQuestion) -> int:
        """Write an entry for a question whose documents are about to be read. Returns its id."""
        with self._rows.changing() as rows:
            return self._insert(rows, question, None)

    def refuse(self, question: CloudQuestion, reason: str, times: int) -> None:
        """Write refusals for one reason, of which this question was the first: a new entry, or more times in that of
        the last minute."""
        outcome = REFUSED + reason
        with self._rows.changing() as rows:
            known = rows.execute(
                "UPDATE questions SET times = times + ? WHERE refused AND began > ? AND asker = ? AND outcome = ?",
                (times, time.time() - MINUTE_S, printable(question.asker), outcome),
            )
            if not known.rowcount:
                self._insert(rows, question, outcome, times)

    def read(self, entry: int, documents: Sequence[str]) -> None:
        """Note the ids of the documents that an answer reads."""
        self._write("UPDATE questions SET documents = ? WHERE id = ?", json.dumps(list(documents)), entry)

    def end(self, entry: int, outcome: str, sent: Mapping[str, int], tokens: int) -> None:
        done = outcome, json.dumps(dict(sent)), tokens, entry
        self._write("UPDATE questions SET outcome = ?, sent = ?, tokens = ? WHERE id = ?", *done)

    def _insert(self, rows: SqlConnection, question: CloudQuestion, outcome: str | None, times: int = 1) -> int:
        if self._written % _TRIM_EVERY == 0:
            self._trim(rows)
        self._written += 1
        text, asker = printable(question.text)[:MAX_QUESTION], printable(question.asker)
        ((entry,),) = rows.execute(
            "INSERT INTO questions (began, asker, question, privacy, refused, times, documents, sent, tokens, outcome) "
            "VALUES (?, ?, ?, ?, ?, ?, '[]', '{}', 0, ?) RETURNING id",
            (time.time(), asker, text, question.privacy, outcome is not None, times, outcome),
        ).fetchall()
        return int(entry)

    def _trim(self, rows: SqlConnection) -> None:
        rows.execute("DELETE FROM questions WHERE began < ?", (time.time() - MAX_AGE_S,))
        for refused in (False, True):
            rows.execute(
                "DELETE FROM questions WHERE refused = ? AND id <= (SELECT id FROM questions WHERE refused = ? "
                "ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (refused, refused, MAX_ENTRIES - _TRIM_EVERY),
            )

    def _write(self, statement: str, *values: object) -> None:
        with self._rows.reading() as rows:
            rows.execute(statement, values)

    # ---- reading ----------------------------------------------------------------------------------------------------
    def recent(self, count: int) -> list[Activity]:
        """The newest entries, oldest first."""
        with self._rows.reading() as rows:
            found = rows.execute(
                "SELECT began, asker, question, privacy, refused, times, documents, sent, tokens, outcome "
                "FROM questions ORDER BY id DESC LIMIT ?",
                (count,),
            ).fetchall()
        return [
            Activity(
                when, asker, text, level, bool(refused), times, tuple(json.loads(ids)), json.loads(sent), tokens, end
            )
            for when, asker, text, level, refused, times, ids, sent, tokens, end in reversed(found)
        ]

    def admitted_since(self, moment: float) -> list[float]:
        """Times of the questions admitted since then, in s since 1970."""
        with self._rows.reading() as rows:
            found = rows.execute(
                "SELECT began FROM questions WHERE refused = FALSE AND began > ? ORDER BY began", (moment,)
            )
            return [began for (began,) in found]


def _opened(state_dir: Path) -> OwnRows:
    return OwnRows(SqliteFile(state_dir / FILE, _KIND), _VERSION, _SCHEMA, _ADVICE)


def answered_for(state_dir: Path, cloud: str) -> MayAsk | None:
    """What a device's owner answered at enrolment: who among the clients of this cloud, by its URL, may ask. None where
    there is no answer. Creates no file; raises ConfigError when that of the activity log cannot be used."""
    if not (state_dir / FILE).exists():
        return None
    with closing(_opened(state_dir)) as opened, opened.reading() as rows:
        found = rows.execute("SELECT may_ask FROM answers WHERE cloud = ?", (_place(cloud),)).fetchone()
    return None if found is None else MayAsk.parse(found[0])


def keep_answer(state_dir: Path, cloud: str, may_ask: MayAsk) -> None:
    with closing(_opened(state_dir)) as opened, opened.reading() as rows:
        rows.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (_place(cloud), str(may_ask)))


def permission(settings: AgentSettings) -> tuple[MayAsk, str]:
    """Who may ask this device, and where that was said: a setting comes before the answer at enrolment. Raises
    ConfigError for answers that cannot be read."""
    if settings.cloud_may_ask is not None:
        return MayAsk.parse(settings.cloud_may_ask), "as set"
    answered = None if settings.cloud is None else answered_for(settings.state_dir, settings.clouds[0])
    return (NOBODY, "the default") if answered is None else (answered, "as answered at enrolment")


def _place(cloud: str) -> str:
    """The cloud's host, port and path: the same for http and ws."""
    url = urlsplit(cloud)
    return url.netloc.lower() + url.path.rstrip("/")


MINUTE_S = 60.0
HOUR_S = 3600.0


class AskCounter:
    """Counts the questions of the cloud that a device has admitted over the last minute and hour."""

    def __init__(self, per_minute: int = 60, per_hour: int = 1200) -> None:
        """0: any number. By default a person's, whose front end asks four times a message."""
        self._per_minute, self._per_hour = per_minute, per_hour
        self._times = deque[float]()

    def begin(self, earlier: Sequence[float]) -> None:
        """earlier: rising times of questions that were admitted before, so that a restart does not renew the budget."""
        self._times.extend(earlier)

    def take(self, now: float) -> str | None:
        """Count one more question at this time, in s; or why it is one too many, as the end of a sentence."""
        if self._times and self._times[-1] > now:  # the clock has been set back
            self._times = deque(each for each in self._times if each <= now)
        while self._times and self._times[0] <= now - HOUR_S:
            self._times.popleft()
        per_minute, per_hour = self._per_minute, self._per_hour
        if 0 < per_hour <= len(self._times):
            minutes = max(1, round((self._times[-per_hour] + HOUR_S - now) / 60))
            return f"its budget of {per_hour} questions an hour is used up for {minutes} min"
        if 0 < per_minute <= sum(each > now - MINUTE_S for each in self._times):
            return f"it answers no more than {per_minute} questions of the cloud a minute"
        self._times.append(now)
        return None


MAX_KINDS = 16  # a minute; further ones share an entry
_OTHERS = "for further reasons, or of further keys"


class Refusals:
    """Refused questions on their way to the activity log: those of one minute, reason and key become one entry.

    A cloud may send thousands a second. What is kept of them, and the disk accesses, do not grow with their number.
    `add` belongs to the event loop; what is pending is written on the writer's thread, all at once.
    """

    def __init__(self, later: Callable[[Callable[[ActivityLog], None]], None]) -> None:
        """later: see `CloudAsks.later`."""
        self._later = later
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], tuple[CloudQuestion, int]] = {}  # the first, and how many; by reason, key
        self._minute, self._kinds = 0, set[tuple[str, str]]()  # of the newest one; the event loop's

    def add(self, question: CloudQuestion, reason: str, now: float) -> None:
        """Note one refusal. now: s."""
        if self._minute != (minute := int(now // MINUTE_S)):
            self._minute, self._kinds = minute, set()
        kind = reason, question.asker
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            question, kind = replace(question, asker=""), (_OTHERS, "")
        self._kinds.add(kind)
        with self._lock:
            is_first = not self._pending
            first, times = self._pending.get(kind, (question, 0))
            self._pending[kind] = first, times + 1
        if is_first:
            self._later(self._write)

    def _write(self, activity: ActivityLog) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for (reason, _), (question, times) in pending.items():
            activity.refuse(question, reason, times)


MAX_BIASES = 300  # token ids in `logit_bias`, as for a client
ROLES = frozenset({"system", "user", "assistant", "tool"})  # of a conversation that the HTTP API has read
MAX_REMEMBERED = 64  # answers that may be joined again
REJOIN_S = 180.0  # for which they may; a paused answer waits for a minute
MAX_REJOINS = 1000  # of one question, which cost none of the budget of questions
MAX_TARGETS = 131_072  # of one answer, as in an opening
MAX_OUTCOME = 300  # characters


class CloudAsks:
    """Admission of sessions that a cloud opens at a device, each of which reads private documents.

    A cloud may be curious, or somebody else's by now. So an opening is admitted only if the device's owner allows its
    asker, if it asks for nothing that a client could not, and within a rate and a budget. Every one is in the activity
    log, on disk before a document is read. Belongs to the event loop.
    """

    def __init__(
        self,
        may_ask: MayAsk = NOBODY,
        counter: AskCounter | None = None,
        activity: ActivityLog | None = None,
    ) -> None:
        """activity: closed with this gate; None: nothing is kept, for tests and benches."""
        self.may_ask = may_ask
        self._activity = activity
        self._counter = counter or AskCounter()
        if activity is not None:
            activity.recover()
            self._counter.begin(activity.admitted_since(time.time() - HOUR_S))
        self._writer = Threads(1, "paceline-activity")  # entries in their order
        self._open: dict[bytes, Ask] = {}  # under way, by answer: the newest session of each
        self._left: OrderedDict[bytes, tuple[float, _Part]] = OrderedDict()  # (until, part) by answer
        self._refusals = Refusals(self.later)

    async def close(self) -> None:
        """Write what is left to write."""
        await asyncio.to_thread(self._writer.shutdown)
        if self._activity is not None:
            await asyncio.to_thread(self._activity.close)

    def admit(self, opening: OpenSession, query: str | None = None) -> Ask:
        """Admit an opening. query: what is searched for, if that is not the question alone. Raises PacelineError with
        the reason for a refusal, which `refuse` logs."""
        if not self.may_ask.allows(opening.asker):
            raise PacelineError(self.may_ask.refusal())
        if len(opening.sampling.logit_bias) > MAX_BIASES or any(each.role not in ROLES for each in opening.messages):
            raise PacelineError("no client could ask this")
        answer, targets = _answer_of(opening), tuple(opening.targets)
        part = self._part(answer)
        if targets and part is None:
            raise PacelineError("it has no part in the beginning of this answer")
        question = question_of(opening)
        question = question if query is None else replace(question, text=query)
        again = part is not None and bool(targets or opening.epoch) and part.question == question
        if part is not None and again and part.begins(targets):
            if part.rejoins >= MAX_REJOINS:
                raise PacelineError(f"it has joined this answer {MAX_REJOINS} times again")
            part.rejoins += 1
            part.known(targets)
        else:  # so is a further search, and an answer that went on otherwise because what this device sent was lost
            if (reason := self._counter.take(time.time())) is not None:
                raise PacelineError(reason)
            part = _Part(question, list(targets))
        ask = self._open[answer] = Ask(self, answer, part)
        return ask

    def _part(self, answer: bytes) -> _Part | None:
        """What is known of an answer that this device has taken part in."""
        until, part = self._left.get(answer, (0.0, None))
        if (ask := self._open.get(answer)) is not None:  # its closing is still to be read
            part = ask.part
        elif time.time() >= until:
            part = None
        return part

    # ---- the log ----------------------------------------------------------------------------------------------------
    def refuse(self, opening: OpenSession, reason: str) -> None:
        log.debug("a question of the cloud's is refused: %s", reason)  # a cloud may send thousands
        if self._activity is not None:
            self._refusals.add(question_of(opening), reason, time.time())

    async def begun(self, question: CloudQuestion) -> int | None:
        """The entry of an admitted question, once it is on disk. Raises PacelineError when it cannot be written."""
        if self._activity is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._activity.begin, question)

    def later(self, write: Callable[[ActivityLog], None]) -> None:
        """Write to the log, after what was written before."""
        if self._activity is not None:
            self._writer.submit(_attempt, write, self._activity)

    def left(self, answer: bytes, ask: Ask) -> None:
        """Remember an answer that has ended here, so that this device may take part again."""
        if self._open.get(answer) is not ask:
            return  # it has been joined again
        del self._open[answer]
        self._left[answer] = time.time() + REJOIN_S, ask.part
        self._left.move_to_end(answer)
        while len(self._left) > MAX_REMEMBERED:
            self._left.popitem(last=False)


@dataclass(slots=True)
class _Part:
    """This device's part in an answer to one question, over all sessions in which it was joined: one entry of the
    log."""

    question: CloudQuestion
    targets: list[int]  # tokens of the answer, as far as this device knows them
    rejoins: int = 0
    entry: int | None = None  # once it is on disk
    writing: asyncio.Future[int | None] | None = None  # of the entry
    documents: set[str] = field(default_factory=set)  # ids of those read
    sent: Counter[str] = field(default_factory=Counter)  # bytes by kind of message, of sessions that have ended

    def begins(self, targets: Sequence[int]) -> bool:
        """The answer begins as this device knows it; what follows was written while the device was away."""
        shared = min(len(self.targets), len(targets))
        return self.targets[:shared] == list(targets[:shared])

    def known(self, targets: Sequence[int]) -> None:
        """The answer goes on like this."""
        self.targets += targets[len(self.targets) :]


class Ask:
    """A session of an admitted question, until it has ended."""

    def __init__(self, gate: CloudAsks, answer: bytes, part: _Part) -> None:
        self._gate = gate
        self._answer = answer
        self.part = part
        self._end: Callable[[ActivityLog], None] | None = None

    async def begin(self) -> None:
        """Log the question, before documents are read for it. Raises PacelineError when that is impossible."""
        part = self.part
        if part.writing is None:
            part.writing = asyncio.ensure_future(self._gate.begun(part.question))
        try:
            part.entry = await asyncio.shield(part.writing)
        except PacelineError:
            part.writing = None
            raise
        if self._end is not None:  # meanwhile
            self._gate.later(self._end)

    def reads(self, documents: Iterable[str]) -> None:
        """Log the ids of the documents that the answer reads."""
        self.part.documents.update(documents)
        entry, ids = self.part.entry, sorted(self.part.documents)
        if entry is not None:
            self._gate.later(lambda activity: activity.read(entry, ids))

    def observe(self, message: SessionMessage) -> None:
        """Follow the targets, of which this device may be told again when it joins the answer again."""
        known = len(self.part.targets)
        if isinstance(message, Targets) and not message.sources and message.start <= known < MAX_TARGETS:
            self.part.targets += message.tokens[known - message.start :]

    def end(self, outcome: str, egress: Egress) -> None:
        if self._end is not None:
            return
        part = self.part
        part.sent.update(egress.kinds())
        sent, tokens = dict(part.sent), len(part.targets)
        times = f"; joined again ({part.rejoins})" if part.rejoins else ""

        def write(activity: ActivityLog) -> None:
            if part.entry is not None:
                activity.end(part.entry, printable(outcome)[:MAX_OUTCOME] + times, sent, tokens)

        self._end = write
        self._gate.left(self._answer, self)
        if part.entry is not None:
            self._gate.later(write)


def question_of(opening: OpenSession) -> CloudQuestion:
    """The question of an opening: what is searched for, since the last message alone may refer to earlier ones."""
    messages = [{"role": message.role, "content": message.content} for message in opening.messages]
    return CloudQuestion(opening.asker, query_of(messages), opening.privacy)


def _answer_of(opening: OpenSession) -> bytes:
    """A digest of everything that an answer depends on, equal whenever the answer is opened again."""
    fixed = msgspec.structs.replace(opening, session=0, epoch=0, targets=[])
    return hashlib.sha256(msgspec.msgpack.encode(fixed)).digest()


def _attempt(write: Callable[[ActivityLog], None], activity: ActivityLog) -> None:
    try:
        write(activity)
    except PacelineError as error:
        log.error("the activity log is not complete: %s", error)
