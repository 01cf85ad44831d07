"""The owner's policy at work: what is kept of it between answers, and what it says of one request.

Kept in the state directory, or in the database that several servers share: which documents were confirmed, what each
day has taken, and marks of texts that a rule holds, by which a conversation that goes on from one is recognised,
whichever server wrote it. Marks are keyed hashes of pieces of the texts, so that the store says nothing. Where
something of it cannot be read at the start, the program does not start; where that happens later, what holds is the
strictest until it can: budgets are used up, nothing leaves, and nothing is confirmed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

from paceline.core.policy import (
    BUDGETS,
    HIGHEST,
    PIECE,
    PRIVACY_LEVELS,
    Budget,
    Cause,
    Decision,
    Grant,
    Policy,
    Privacy,
    letters,
    pair_letters,
    strictest,
    used_up,
)
from paceline.core.side import Side
from paceline.errors import PacelineError, RequestError, StorageError
from paceline.rag.prompt import query_of
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.readable import Readable, RuledDocument, RuledDocuments, unruled
from paceline.runtime.service import AUTO, GenerateEvent, GenerateRequest, Generation, GenerationResult
from paceline.sql import Home, OwnRows, SqliteFile, place_in
from paceline.strategies.base import JOINT_LEVELS
from paceline.strategies.registry import STRATEGIES
from paceline.system import Threads

log = logging.getLogger("paceline.policy")

STORE: Final = "policy"
NAMED: Final = "named:"  # begins the owner of a question what would happen, which is no key's id
MAX_MARKS: Final = 1 << 17  # of the newest texts, some 4 MB
MAX_AGE_S: Final = 90 * 86_400.0
KEPT_DAYS: Final = 32
SAVE_S: Final = 1.0  # of what was taken, at most so much is lost with the power
VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE policy_secret (one INTEGER PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE policy_confirmed (document BLOB PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE policy_used (day TEXT, budget TEXT, amount REAL NOT NULL, PRIMARY KEY (day, budget)) WITHOUT ROWID",
    """CREATE TABLE policy_marks (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- another one whenever its level changes
        mark BLOB NOT NULL UNIQUE,
        level TEXT NOT NULL,
        at REAL NOT NULL
    )""",
)


_UNMARKED: Final = ""  # in the place of an answer that is not marked yet


def forbidden(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, status=403, code="policy_forbids", param=param)


def tables(state: Path | Home | None) -> OwnRows:
    """Made where there are none. Raises ConfigError and StorageError where they cannot be used."""
    kind, advice = "a file of the policy", "remove the file: documents are then asked for anew"
    place = SqliteFile(None, kind) if state is None else place_in(state, STORE, kind)
    return OwnRows(place, VERSION, _SCHEMA, advice)


class PolicyState:
    """A store in a state directory, in a database, or in memory. Safe to use from several threads and processes. Raises
    ConfigError and StorageError where it cannot be used."""

    def __init__(self, state: Path | Home | None) -> None:
        self._rows = tables(state)
        with self._rows.changing() as rows:
            new = "INSERT INTO policy_secret VALUES (1, ?) ON CONFLICT (one) DO NOTHING"
            rows.execute(new, (secrets.token_bytes(32),))
            (self._secret,) = rows.execute("SELECT value FROM policy_secret").fetchone()

    def close(self) -> None:
        self._rows.close()

    @property
    def day(self) -> str:
        """Of this machine."""
        return time.strftime("%Y-%m-%d", time.localtime(time.time()))

    def mark(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=12).digest()

    # ---- confirmations ----------------------------------------------------------------------------------------------
    def confirm(self, document: RuledDocument, *, confirmed: bool = True) -> None:
        mark = self.mark(document.identity)
        with self._rows.reading() as rows:
            if confirmed:
                new = "INSERT INTO policy_confirmed VALUES (?, ?) ON CONFLICT (document) DO NOTHING"
                rows.execute(new, (mark, time.time()))
            else:
                rows.execute("DELETE FROM policy_confirmed WHERE document = ?", (mark,))

    def confirmed(self) -> frozenset[bytes]:
        """Marks of their identities."""
        with self._rows.reading() as rows:
            return frozenset(mark for (mark,) in rows.execute("SELECT document FROM policy_confirmed"))

    # ---- what was taken ---------------------------------------------------------------------------------------------
    def used(self) -> dict[Budget, float]:
        """Today."""
        with self._rows.reading() as rows:
            found = rows.execute("SELECT budget, amount FROM policy_used WHERE day = ?", (self.day,)).fetchall()
        return {cast(Budget, budget): float(amount) for budget, amount in found if budget in BUDGETS}

    def take(self, day: str, taken: Mapping[Budget, float]) -> None:
        with self._rows.changing() as rows:
            rows.executemany(
                "INSERT INTO policy_used VALUES (?, ?, ?) ON CONFLICT (day, budget) DO UPDATE SET amount = "
                "policy_used.amount + excluded.amount",
                [(day, budget, amount) for budget, amount in taken.items()],
            )
            rows.execute(
                "DELETE FROM policy_used WHERE day NOT IN "
                "(SELECT DISTINCT day FROM policy_used ORDER BY day DESC LIMIT ?)",
                (KEPT_DAYS,),
            )

    # ---- marks ------------------------------------------------------------------------------------------------------
    def marks(self, after: int = 0) -> tuple[int, dict[bytes, Privacy]]:
        """The oldest first, of those that any server has made since, and until when they are."""
        with self._rows.reading() as rows:
            found = rows.execute(
                "SELECT seq, mark, level FROM policy_marks WHERE seq > ? AND at > ? ORDER BY seq",
                (after, time.time() - MAX_AGE_S),
            ).fetchall()
        known: dict[bytes, Privacy] = {
            mark: level if level in PRIVACY_LEVELS else "local-only" for _, mark, level in found
        }
        return max((seq for seq, _, _ in found), default=after), known

    def add_marks(self, marks: Mapping[bytes, Privacy]) -> None:
        now = time.time()
        with self._rows.changing() as rows:
            rows.executemany("DELETE FROM policy_marks WHERE mark = ?", [(mark,) for mark in marks])
            rows.executemany(
                "INSERT INTO policy_marks (mark, level, at) VALUES (?, ?, ?)",
                [(mark, level, now) for mark, level in marks.items()],
            )
            rows.execute("DELETE FROM policy_marks WHERE at <= ?", (now - MAX_AGE_S,))
            rows.execute(
                "DELETE FROM policy_marks WHERE seq <= (SELECT seq FROM policy_marks ORDER BY seq DESC LIMIT 1 "
                "OFFSET ?)",
                (MAX_MARKS,),
            )

    def drop_mark(self, mark: bytes) -> None:
        with self._rows.reading() as rows:
            rows.execute("DELETE FROM policy_marks WHERE mark = ?", (mark,))


class PolicyGuard:
    """The policy of one side. `spend` and `remember` belong to no thread; they write the disk on one of their own."""

    def __init__(
        self,
        side: Side,
        policy: Policy | None = None,
        state: Path | Home | None = None,
        names: Callable[[str], str] = str,
    ) -> None:
        """state: where it is kept; None: in memory. names: of keys, by the id that owns what they create; empty: it has
        none. Raises ConfigError and StorageError where what was kept cannot be read."""
        self.policy = policy or Policy()
        self._side: Side = side
        self._names = names
        grants = (*self.policy.keys.values(), *self.policy.models.values())
        self._rules_documents = bool(self.policy.rules) or any(each.reads is not None for each in grants)
        self._ruled: RuledDocuments | None = None
        self._lock = threading.Lock()  # of all below
        self._fault: PacelineError | None = None  # why something cannot be read or written now
        self._pending = defaultdict[Budget, float](float)
        self._saved = 0.0  # s, monotonic
        self._holding = Counter[bytes]()  # answers that are being given, by marks of their questions
        self._unwritten: deque[Callable[[PolicyState], None]] = deque()
        self.state = PolicyState(state if self.policy else None)
        self._seen, marks = self.state.marks()
        self._marks = OrderedDict(marks)  # the newest last
        self._day, self._used = self.state.day, defaultdict[Budget, float](float, self.state.used())
        self._writer = Threads(1, "paceline-policy")

    def close(self) -> None:
        """Write what is left to write."""
        self._save()
        self._writer.shutdown()
        self.state.close()

    # ---- documents --------------------------------------------------------------------------------------------------
    def readable(
        self,
        store: DocumentStore,
        owner: str,
        model: str = "",
        *,
        peer: bool = False,
        level: Privacy | None = None,
    ) -> Readable:
        """This side's documents for a reader. owner: the key's id. peer: the other side reads them, and gets none that
        has a rule. level: of an answer that has begun: what had to be held more strictly is not read for it."""
        if not self._rules_documents:
            return unruled(store)
        if self._ruled is None or self._ruled.store is not store:
            self._ruled = RuledDocuments(store, self.policy)
        grants = self._grants_of(owner, model)
        confirmed = functools.cache(self._confirmed)  # by the thread that searches

        def kept(document: RuledDocument) -> bool:
            """Not read, confirmed or not."""
            levels = [HIGHEST[each.rule] for each in document.rules]
            strict = level is not None and self._strictest(*levels, level) != level
            return (peer and bool(levels)) or strict or not all(grant.may_read(document.facts) for grant in grants)

        def asked(document: RuledDocument) -> bool:
            return document.is_asked_for and self.state.mark(document.identity) not in confirmed()

        return Readable(
            store,
            self._ruled,
            lambda each: kept(each) or asked(each),
            lambda each: asked(each) and not kept(each),
            lambda text, rules: self._tell(text, self._strictest(*(HIGHEST[each.rule] for each in rules))),
            bars_others=any(grant.reads is not None for grant in grants),
        )

    def _strictest(self, *levels: Privacy) -> Privacy:
        found = strictest("open", *levels)
        return "local-only" if found == "answer-private" and self._side == "cloud" else found

    def _confirmed(self) -> frozenset[bytes]:
        try:
            return self.state.confirmed()
        except PacelineError as error:
            log.error("no document counts as confirmed: %s", error)
            return frozenset()

    def _grants_of(self, owner: str, model: str) -> Sequence[Grant]:
        own = not owner or owner.startswith("peer:")
        name = owner.removeprefix(NAMED) if owner.startswith(NAMED) else self._names(owner)
        return self.policy.grants(None if own else name, model)

    def may_confirm(self, owner: str) -> bool:
        """Over HTTP: a key that the policy names for it. Without keys there is the terminal."""
        return bool(owner) and any(each.confirms for each in self._grants_of(owner, ""))

    def confirm(self, store: DocumentStore | None, owner: str, document_id: str) -> str:
        """Confirm a document that is to be asked for. Returns its name. Raises RequestError."""
        if not self.may_confirm(owner):
            raise forbidden(
                "This key may not confirm documents. Their owner does it at a terminal: paceline policy allow NAME; or "
                "with a key for which [policy.keys] of the file says confirms = true."
            )
        documents = () if store is None else self.readable(store, owner).documents()
        known = {each.id: each for each in documents if each.is_asked_for}
        if document_id not in known:
            raise RequestError("There is no such document.", status=404, code="not_found", param="document")
        self.state.confirm(known[document_id])
        return known[document_id].name

    # ---- requests ---------------------------------------------------------------------------------------------------
    def decide(self, request: GenerateRequest, model: str) -> Decision:
        """The level of an answer, before anything is read for it. Takes some time: on any thread. Raises RequestError
        for a model that its key may not use."""
        decision = Decision(request.wish.privacy)
        if not self.policy:
            return decision
        is_known = self._see_others()
        grants = self._grants_of(request.account.owner, model)
        for grant in grants:
            if grant.models is not None and model not in grant.models:
                raise forbidden(f"This key may not use the model {model}.", "model")
        causes = [Cause(grant.privacy, f"{grant.whose}: {grant.privacy}") for grant in grants]
        causes += [Cause("local-only", f"budget of today: {name}") for name in self.used_up() if name != "joules"]
        causes += [] if is_known else [Cause("local-only", "what rules hold cannot be read now")]
        decision = decision.narrowed(causes, self._side)
        level = self._held(request)
        return decision.narrowed([Cause(level, "a text that a rule holds")], self._side, holds=True)

    def _held(self, request: GenerateRequest) -> Privacy:
        """By texts of the conversation that a rule holds."""
        marks = self._marks
        if not marks or request.prompt.tokens is not None:
            return "open"
        form = request.output.constraint
        beside = (*map(str, request.prompt.template.values()), "" if form is None else form.text)
        said = [message["content"] for message in request.prompt.messages]
        pairs = ((question, each) for question, answer in pairwise(said) for each in (answer, _UNMARKED))
        whole = [marks.get(self.state.mark(pair_letters(*pair))) for pair in pairs]
        found = [self._quoted(text, marks) for text in (*said, *beside)]
        level = strictest("open", *found, *(each for each in whole if each is not None))
        if level == "answer-private" and self._quoted(query_of(request.prompt.messages), marks) != "open":
            return "local-only"  # the query is what would leave
        return level

    def _quoted(self, text: str, marks: Mapping[bytes, Privacy]) -> Privacy:
        own = letters(text)
        found = {marks.get(self.state.mark(own[at : at + PIECE])) for at in range(len(own) - PIECE + 1)}
        return strictest("open", *(each for each in found if each is not None))

    def held_to(self, request: GenerateRequest, decision: Decision) -> GenerateRequest:
        """The request at the level decided: the one place where that is set, which all that follows obeys. Raises
        RequestError where it demands the other side, and that may not be had."""
        joining, level = request.joining, decision.level
        if level == request.wish.privacy:
            return request
        if level not in JOINT_LEVELS and (joining.names_device or joining.on_loss != "continue"):
            raise forbidden(
                f"A rule of this side's owner holds this answer to '{level}' ({decision.rule}), and the request does "
                "not want an answer without the other side.",
                "paceline.privacy",
            )
        wish, strategy = replace(request.wish, privacy=level), STRATEGIES.get(request.wish.strategy)
        if strategy is not None and strategy.needs_peer and level not in strategy.privacy_levels:
            wish = replace(wish, strategy=AUTO)
        return replace(request, wish=wish)

    def for_client(self, decision: Decision, owner: str, asked: Mapping[str, str]) -> Decision:
        """With the documents that wait for a confirmation, for those who may give it."""
        own = not owner or self.may_confirm(owner)
        return replace(decision, asks=tuple(asked.items())) if own and asked else decision

    def remember(self, text: str, level: Privacy, last: str | None = None, before: str = "") -> None:
        """Hold what goes on from this text to this level. last: said before it, by which a short text is known.
        before: `letters` of all that was said, which are no sign of the text where it repeats them."""
        if level == "open":
            return
        own = letters(text)
        pieces = [own[at : at + PIECE] for at in range(0, len(own) - PIECE + 1, PIECE)]
        is_short = last is not None and not pieces
        pieces = [pair_letters(last or "", text)] if is_short else [piece for piece in pieces if piece not in before]
        new: dict[bytes, Privacy] = {}
        with self._lock:
            for piece in pieces:
                mark = self.state.mark(piece)
                known = self._marks.get(mark, "open")
                if known != self._mark(mark, level):
                    new[mark] = self._marks[mark]
            self._forget()
        if new:
            self._later(lambda state: state.add_marks(new))

    def _tell(self, text: str, level: Privacy) -> None:
        """Remember a text that is shown. Raises StorageError where that cannot be kept. Not on the loop's thread."""
        self.remember(text, level)
        if self._unwritten:
            self.written().result()
            self._check_written()

    async def hold(self, question: str, level: Privacy) -> bytes | None:
        """Keep, before an answer is given, that whatever follows this question is held to this level, for a program
        that ends before it has marked the answer itself. Returns what `release` takes then; None where it was so
        before. Raises StorageError where it cannot be kept."""
        mark = self.state.mark(pair_letters(question, _UNMARKED))
        with self._lock:
            known = self._marks.get(mark, "open")
            is_new = self._mark(mark, level) != known
            is_ours = known == "open" or mark in self._holding
            self._holding.update([mark] * is_ours)
        if is_new:
            self._later(lambda state: state.add_marks({mark: level}))
        try:
            await asyncio.wrap_future(self.written())
            self._check_written()
        except BaseException:  # also where the client leaves meanwhile
            if is_ours:
                self.release(mark)
            raise
        return mark if is_ours else None

    def release(self, mark: bytes) -> None:
        """Forget what `hold` has kept, once all that was remembered before is written."""
        with self._lock:
            self._holding -= Counter([mark])
            if mark in self._holding:
                return  # another answer to that question is being given
            self._marks.pop(mark, None)
        self._later(lambda state: state.drop_mark(mark))

    def _check_written(self) -> None:
        if self._unwritten and self._fault is not None:
            full = isinstance(self._fault, StorageError) and self._fault.full
            raise StorageError(f"What a rule holds cannot be marked: {self._fault}", full=full)

    # ---- budgets ----------------------------------------------------------------------------------------------------
    def used_up(self) -> Sequence[Budget]:
        """Budgets of which nothing is left today; all, where that cannot be known."""
        budgets = self.policy.budgets
        if not budgets:
            return ()
        with self._lock:
            self._turn(self.state.day)
            return [*budgets] if self._fault else used_up(budgets, self._used)

    def left(self) -> dict[Budget, float]:
        with self._lock:
            self._turn(self.state.day)
            return {name: max(0.0, most - self._used[name]) for name, most in self.policy.budgets.items()}

    def refuse_spent(self) -> None:
        """Raises RequestError where nothing more is to be computed today."""
        if "joules" in self.used_up():
            raise RequestError(
                "This side's energy budget of today is used up: [policy] joules of its settings.",
                status=429,
                type="rate_limit_error",
                code="budget_used_up",
            )

    def spend(self, budget: Budget, amount: float) -> None:
        if budget not in self.policy.budgets or amount <= 0:
            return
        with self._lock:
            self._turn(self.state.day)
            self._used[budget] += amount
            self._pending[budget] += amount
            due = time.monotonic() - self._saved >= SAVE_S
        if due:
            self._save()

    def _turn(self, day: str) -> None:
        """Begin a day, under the lock."""
        if day == self._day:
            return
        self._flush(self._day)
        self._day, self._used = day, defaultdict[Budget, float](float)
        try:
            self._used.update(self.state.used())  # the clock may have been set back
        except PacelineError as error:
            self._failed(error)

    def written(self) -> Future[None]:
        """Ends once what was remembered and spent until now is written, or cannot be."""
        return self._on_writer(self._write)

    def _see_others(self) -> bool:
        """Learn what other servers have remembered and spent. False where that cannot be known now."""
        is_known = False  # told by this reading: what is written after it may succeed

        def read() -> None:
            nonlocal is_known
            self._write()
            if self._unwritten:
                return
            day = self.state.day
            try:
                seen, marks = self.state.marks(self._seen)
                used = self.state.used()
            except PacelineError as error:
                self._failed(error)
                return
            with self._lock:
                self._seen, self._fault, is_known = seen, None, True
                self._turn(self.state.day)
                for mark, level in marks.items():
                    self._mark(mark, level)
                self._forget()
                if self._unwritten or day != self._day:
                    return  # something was spent behind what was read, or the day has turned
                for budget in self.policy.budgets:
                    self._used[budget] = used.get(budget, 0.0) + self._pending[budget]

        self._on_writer(read).result()
        return is_known

    def _save(self) -> None:
        with self._lock:
            self._flush(self._day)

    def _flush(self, day: str) -> None:
        taken, self._pending = dict(self._pending), defaultdict[Budget, float](float)
        self._saved = time.monotonic()
        if taken:
            self._later(lambda state: state.take(day, taken))

    def _mark(self, mark: bytes, level: Privacy) -> Privacy:
        """Hold what has this mark to this level too, under the lock. Who reads without it misses no mark."""
        found = self._marks[mark] = strictest(self._marks.get(mark, "open"), level)
        self._marks.move_to_end(mark)
        return found

    def _forget(self) -> None:
        """The oldest marks, under the lock."""
        while len(self._marks) > MAX_MARKS:
            self._marks.popitem(last=False)

    def _later(self, write: Callable[[PolicyState], None]) -> None:
        self._unwritten.append(write)
        self._on_writer(self._write)

    def _on_writer(self, work: Callable[[], None]) -> Future[None]:
        try:
            return self._writer.submit(work)
        except RuntimeError:  # it is closed
            ended = Future[None]()
            ended.set_result(None)
            return ended

    def _write(self) -> None:
        """What waits, in its order; what cannot be written now waits on. On the writer's thread."""
        while self._unwritten:
            try:
                self._unwritten[0](self.state)
            except PacelineError as error:
                self._failed(error)
                return
            self._unwritten.popleft()
            self._fault = None

    def _failed(self, error: PacelineError) -> None:
        log.error("budgets of this day count as used up: %s", error)
        self._fault = error


class HeldAnswer:
    """An answer whose text is marked as far as a rule holds it, before its client sees it."""

    def __init__(
        self, written: Generation, guard: PolicyGuard, decision: Decision, messages: Sequence[Mapping[str, str]]
    ) -> None:
        """messages: before it. decision: it may become narrower as the answer grows."""
        self.written = written
        self.decision = decision
        self._guard = guard
        self._said = [message["content"] for message in messages]
        self._before: str | None = None  # letters of all that
        # An answer may go on from a beginning, which its message will then hold too.
        self._question = next((each["content"] for each in reversed(messages) if each["role"] != "assistant"), None)
        self._text = self._rest = ""  # so far, and what of it is not marked
        self._held: Privacy = "open"  # as kept before its text is given
        self._kept: list[bytes | None] = []  # what was kept so

    @property
    def prompt_tokens(self) -> int:
        return self.written.prompt_tokens

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        async with aclosing(self.written.run()) as events:
            try:
                async for event in events:
                    if self._question is not None and self.decision.holds != self._held:
                        self._held = self.decision.holds
                        self._kept.append(await self._guard.hold(self._question, self._held))
                    if isinstance(event, GenerationResult):
                        self._remember(self._text)
                        await asyncio.wrap_future(self._guard.written())  # before a client goes on at another server
                        told = self.decision if self.decision.rule or self.decision.asks else None
                        event = replace(event, policy=event.policy or told)
                    else:
                        self._mark(event.text)
                    yield event
            finally:
                self._remember(self._text)
                for mark in filter(None, self._kept):
                    self._guard.release(mark)

    def _mark(self, text: str) -> None:
        self._text += text
        self._rest += text
        if len(self._rest) >= 2 * PIECE:
            self._remember(self._rest)
            self._rest = self._rest[-PIECE:]

    def _remember(self, text: str) -> None:
        if (level := self.decision.holds) != "open":
            self._before = letters("\0".join(self._said)) if self._before is None else self._before  # once: it is long
            self._guard.remember(text, level, self._said[-1] if self._said else None, self._before)

    async def aclose(self) -> None:
        await self.written.aclose()
