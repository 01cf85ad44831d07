"""Admission of sessions that a cloud opens at a device, each of which reads private documents.

A cloud may be curious, or somebody else's by now. So an opening is admitted only if the device's owner allows its
asker, if it asks for nothing that a client could not, and within a rate and a budget. Every one is in the activity
log, on disk before a document is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from paceline.core.permission import NOBODY, MayAsk
from paceline.core.printable import printable
from paceline.errors import PacelineError
from paceline.rag.prompt import query_of
from paceline.runtime.asking.activity import ActivityLog, Question
from paceline.runtime.asking.limits import HOUR_S, AskCounter, AskLimits
from paceline.runtime.asking.refusals import Refusals
from paceline.runtime.sessions.egress import Egress
from paceline.wire.messages import OpenSession, SessionMessage, Targets

log = logging.getLogger("paceline.asking")

MAX_BIASES = 300  # token ids in `logit_bias`, as for a client
ROLES = frozenset({"system", "user", "assistant", "tool"})  # of a conversation that the HTTP API has read
MAX_REMEMBERED = 64  # answers that may be joined again
REJOIN_S = 180.0  # for which they may; a paused answer waits for a minute
MAX_REJOINS = 1000  # of one question, which cost none of the budget of questions
MAX_TARGETS = 131_072  # of one answer, as in an opening
MAX_OUTCOME = 300  # characters


class CloudAsks:
    """The gate of one device. Belongs to the event loop."""

    def __init__(
        self,
        may_ask: MayAsk = NOBODY,
        limits: AskLimits | None = None,
        activity: ActivityLog | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """activity: closed with this gate; None: nothing is kept, for tests and benches."""
        self.may_ask = may_ask
        self._activity = activity
        self._now = now
        earlier: Sequence[float] = ()
        if activity is not None:
            activity.recover()
            earlier = activity.admitted_since(now() - HOUR_S)
        self._counter = AskCounter(limits or AskLimits(), earlier)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="paceline-activity")  # entries in their order
        self._open: dict[bytes, Ask] = {}  # under way, by answer: the newest session of each
        self._left: OrderedDict[bytes, tuple[float, _Part]] = OrderedDict()  # (until, part) by answer
        self._refusals = None if activity is None else Refusals(activity, self._writer.submit)

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
        part = self._part(answer, targets)
        if targets and part is None:
            raise PacelineError("it has no part in the beginning of this answer")
        question = question_of(opening)
        question = question if query is None else replace(question, text=query)
        if part is not None and (targets or opening.epoch) and part.question == question:
            if part.rejoins >= MAX_REJOINS:
                raise PacelineError(f"it has joined this answer {MAX_REJOINS} times again")
            part.rejoins += 1
            part.known(targets)
        else:  # a further search of an answer is a question of its own
            if (reason := self._counter.take(self._now())) is not None:
                raise PacelineError(reason)
            part = _Part(question, list(targets))
        ask = self._open[answer] = Ask(self, answer, part)
        return ask

    def _part(self, answer: bytes, targets: tuple[int, ...]) -> _Part | None:
        """What is known of an answer that this device has taken part in, if the targets begin so.

        No client can choose how an answer begins. What follows was written while the device was away.
        """
        until, part = self._left.get(answer, (0.0, None))
        if (ask := self._open.get(answer)) is not None:  # its closing is still to be read
            part = ask.part
        elif self._now() >= until:
            part = None
        shared = 0 if part is None else min(len(part.targets), len(targets))
        return part if part is not None and part.targets[:shared] == list(targets[:shared]) else None

    # ---- the log ----------------------------------------------------------------------------------------------------
    def refuse(self, opening: OpenSession, reason: str) -> None:
        """Log a refusal."""
        log.debug("a question of the cloud's is refused: %s", reason)  # a cloud may send thousands
        if self._refusals is not None:
            self._refusals.add(question_of(opening), reason, self._now())

    async def begun(self, question: Question) -> int | None:
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
        self._left[answer] = self._now() + REJOIN_S, ask.part
        self._left.move_to_end(answer)
        while len(self._left) > MAX_REMEMBERED:
            self._left.popitem(last=False)


@dataclass(slots=True)
class _Part:
    """This device's part in an answer to one question, over all sessions in which it was joined: one entry of the
    log."""

    question: Question
    targets: list[int]  # tokens of the answer, as far as this device knows them
    rejoins: int = 0
    entry: int | None = None  # once it is on disk
    writing: asyncio.Future[int | None] | None = None  # of the entry
    documents: set[str] = field(default_factory=set)  # ids of those read
    sent: Counter[str] = field(default_factory=Counter)  # bytes by kind of message, of sessions that have ended

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
        """Log how the session has ended."""
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


def question_of(opening: OpenSession) -> Question:
    """The question of an opening: what is searched for, since the last message alone may refer to earlier ones."""
    messages = [{"role": message.role, "content": message.content} for message in opening.messages]
    return Question(opening.asker, query_of(messages), opening.privacy)


def _answer_of(opening: OpenSession) -> bytes:
    """A digest of everything that an answer depends on, equal whenever the answer is opened again."""
    fixed = msgspec.structs.replace(opening, session=0, epoch=0, targets=[])
    return hashlib.sha256(msgspec.msgpack.encode(fixed)).digest()


def _attempt(write: Callable[[ActivityLog], None], activity: ActivityLog) -> None:
    try:
        write(activity)
    except PacelineError as error:
        log.error("the activity log is not complete: %s", error)
