"""Admission of sessions that a cloud opens at a device, each of which reads private documents.

A cloud may be curious, or somebody else's by now. So an opening is admitted only if the device's owner allows its
asker, if it asks for nothing that a client could not, and within a rate and a budget. Every one is in the activity
log, on disk before a document is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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
        self._open: dict[bytes, Ask] = {}  # under way, by answer
        self._left: OrderedDict[bytes, tuple[float, tuple[int, ...]]] = OrderedDict()  # (until, targets) by answer
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
        answer = _answer_of(opening)
        if opening.targets and not self._may_rejoin(answer, tuple(opening.targets)):
            raise PacelineError("it has no part in the beginning of this answer")
        if (reason := self._counter.take(self._now())) is not None:
            raise PacelineError(reason)
        ask = self._open[answer] = Ask(self, opening, answer, query)
        return ask

    def _may_rejoin(self, answer: bytes, targets: tuple[int, ...]) -> bool:
        """True if this device has taken part in this answer and the targets begin as it knows them.

        No client can choose how an answer begins. What follows was written while the device was away.
        """
        until, known = self._left.get(answer, (0.0, ()))
        if (ask := self._open.get(answer)) is not None:  # its closing is still to be read
            until, known = math.inf, ask.targets
        shared = min(len(known), len(targets))
        return self._now() < until and known[:shared] == targets[:shared]

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
        if self._open.get(answer) is ask:
            del self._open[answer]
        self._left[answer] = self._now() + REJOIN_S, ask.targets
        self._left.move_to_end(answer)
        while len(self._left) > MAX_REMEMBERED:
            self._left.popitem(last=False)


class Ask:
    """An admitted question, until its session has ended."""

    def __init__(self, gate: CloudAsks, opening: OpenSession, answer: bytes, query: str | None = None) -> None:
        """query: see `CloudAsks.admit`."""
        self._gate = gate
        self._answer = answer
        question = question_of(opening)
        self._question = question if query is None else replace(question, text=query)
        self._targets = list(opening.targets)
        self._entry: int | None = None
        self._end: Callable[[ActivityLog], None] | None = None

    @property
    def targets(self) -> tuple[int, ...]:
        """Tokens of the answer, as far as this device knows them."""
        return tuple(self._targets)

    async def begin(self) -> None:
        """Log the question, before documents are read for it. Raises PacelineError when that is impossible."""
        self._entry = await self._gate.begun(self._question)
        if self._end is not None:  # meanwhile
            self._gate.later(self._end)

    def reads(self, documents: Iterable[str]) -> None:
        """Log the ids of the documents that the answer reads."""
        entry, ids = self._entry, sorted(set(documents))
        if entry is not None:
            self._gate.later(lambda activity: activity.read(entry, ids))

    def observe(self, message: SessionMessage) -> None:
        """Follow the targets, of which this device may be told again when it joins the answer again."""
        known = len(self._targets)
        if isinstance(message, Targets) and not message.sources and message.start <= known < MAX_TARGETS:
            self._targets += message.tokens[known - message.start :]

    def end(self, outcome: str, egress: Egress) -> None:
        """Log how the session has ended."""
        if self._end is not None:
            return
        sent, tokens = egress.kinds(), len(self._targets)

        def write(activity: ActivityLog) -> None:
            if self._entry is not None:
                activity.end(self._entry, printable(outcome)[:MAX_OUTCOME], sent, tokens)

        self._end = write
        self._gate.left(self._answer, self)
        if self._entry is not None:
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
