"""The gate for sessions that a cloud opens at a device: who is admitted, how often, and what the log keeps of it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from paceline.core.side import EVERYBODY, NOBODY, MayAsk
from paceline.errors import ConfigError, PacelineError
from paceline.runtime import asking as activity_module
from paceline.runtime import asking as gate_module
from paceline.runtime.asking import (
    FILE,
    Activity,
    ActivityLog,
    AskCounter,
    CloudAsks,
    CloudQuestion,
    keep_answer,
    permission,
)
from paceline.runtime.sessions.driver import Egress
from paceline.settings import AgentSettings
from paceline.wire.messages import ChatMessage, OpenSession, Targets
from tests.clocks import read_from
from tests.wire.samples import SAMPLING, opening

pytestmark = pytest.mark.anyio

OPENING = msgspec.structs.replace(opening(2), asker="notebook")


@dataclass(slots=True)
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands still unless a test sets it."""
    clock = Clock()
    read_from(monkeypatch, clock, gate_module)
    return clock


@asynccontextmanager
async def gate(folder: Path, may_ask: MayAsk = EVERYBODY, limits: AskCounter | None = None) -> AsyncIterator[CloudAsks]:
    asks = CloudAsks(may_ask, limits, ActivityLog(folder))
    try:
        yield asks
    finally:
        await asks.close()


def logged(folder: Path) -> list[Activity]:
    with closing(ActivityLog(folder)) as log:
        return log.recent(1000)


# ---- who ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "asker", "allowed"),
    [
        ("off", "notebook", False),
        ("on", "", True),
        ("notebook, phone", "phone", True),
        ("notebook,phone", "tablet", False),
        ("notebook,phone", "", False),
    ],
)
def test_nobody_everybody_or_named_keys_may_ask(text: str, asker: str, allowed: bool) -> None:
    may_ask = MayAsk.parse(text)
    assert may_ask.allows(asker) is allowed
    assert MayAsk.parse(str(may_ask)) == may_ask
    assert MayAsk.of(None if may_ask.names is None else list(may_ask.names)) == may_ask


@pytest.mark.parametrize("text", ["", "a,,b", ",".join(map(str, range(65))), "x" * 65, "a\nb"])
def test_what_names_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="off, on, or up to 64 names"):
        MayAsk.parse(text)


def test_a_setting_comes_before_the_answer_at_enrolment_and_without_both_nobody_may_ask(tmp_path: Path) -> None:
    def who(**more: object) -> MayAsk:
        return permission(AgentSettings(state_dir=tmp_path, cloud="https://a.example/x", **more))[0]  # type: ignore[arg-type]  # fields

    assert who() == NOBODY
    assert not (tmp_path / FILE).exists(), "looking makes no file"
    keep_answer(tmp_path, "wss://A.example/x/", MayAsk(("notebook",)))
    assert who() == MayAsk(("notebook",))
    assert who(cloud_may_ask="on") == EVERYBODY
    assert permission(AgentSettings(state_dir=tmp_path, cloud="https://b.example"))[0] == NOBODY


# ---- how often ------------------------------------------------------------------------------------------------------
def test_a_minute_and_an_hour_have_limits_of_their_own() -> None:
    counter = AskCounter(per_minute=2, per_hour=3)
    counter.begin([0.0])
    assert counter.take(3500.0) is None and counter.take(3501.0) is None
    assert "budget of 3 questions an hour is used up for 2 min" in (counter.take(3502.0) or "")
    assert counter.take(3600.5) is None, "an hour after the first"
    assert "budget" in (counter.take(3601.0) or "")
    assert counter.take(7200.0) is None and counter.take(7200.0) is None
    assert "no more than 2 questions of the cloud a minute" in (counter.take(7201.0) or "")


def test_questions_of_a_time_that_is_yet_to_come_use_no_budget_up() -> None:
    """The clock was ahead and has been set back."""
    counter = AskCounter(per_minute=60, per_hour=120)
    assert not any(counter.take(7200.0 + 60.0 * minute) for minute in range(60))
    assert not any(counter.take(60.0 * minute) for minute in range(60))


async def test_a_restart_renews_no_budget(tmp_path: Path) -> None:
    for admitted in (2, 0):
        async with gate(tmp_path, limits=AskCounter(per_hour=2)) as asks:
            for _ in range(admitted):
                await asks.admit(OPENING).begin()
            with pytest.raises(PacelineError, match="2 questions an hour"):
                asks.admit(OPENING)


# ---- what -----------------------------------------------------------------------------------------------------------
IMPOSSIBLE: dict[str, OpenSession] = {
    "more biases than a client": msgspec.structs.replace(
        OPENING, sampling=msgspec.structs.replace(SAMPLING, logit_bias=[(token, 1.0) for token in range(301)])
    ),
    "a role of its own": msgspec.structs.replace(OPENING, messages=[ChatMessage("document", "x")]),
    "a beginning of its own": msgspec.structs.replace(OPENING, targets=[1]),
    "an answer it knows nothing of": msgspec.structs.replace(OPENING, targets=[1], epoch=3),
}


@pytest.mark.parametrize("asked", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
async def test_what_no_client_could_ask_is_refused_and_costs_no_budget(tmp_path: Path, asked: OpenSession) -> None:
    async with gate(tmp_path, limits=AskCounter(per_hour=1)) as asks:
        with pytest.raises(PacelineError):
            asks.admit(asked)
        asks.admit(OPENING)


async def test_an_answer_may_be_joined_again_from_what_the_device_knows_of_it(tmp_path: Path) -> None:
    async with gate(tmp_path) as asks:
        ask = asks.admit(OPENING)
        await ask.begin()
        for message in (Targets(2, 0, 0, [5, 6], b""), Targets(2, 0, 1, [6, 7], b""), Targets(2, 0, 9, [1], b"")):
            ask.observe(message)
        ask.end("the link was lost", Egress())
        again = msgspec.structs.replace(OPENING, session=8, epoch=1)
        for known in ([], [5, 6], [5, 6, 7], [5, 6, 7, 40]):  # the last one was decided while the device was away
            asks.admit(msgspec.structs.replace(again, targets=known))
        other = msgspec.structs.replace(again, targets=[5], messages=[ChatMessage("user", "another question")])
        with pytest.raises(PacelineError, match="no part in the beginning"):
            asks.admit(other)
    (entry,) = logged(tmp_path)
    assert (entry.tokens, entry.outcome) == (3, "the link was lost")


async def test_joining_an_answer_again_costs_no_question_and_has_a_budget_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "MAX_REJOINS", 20)
    async with gate(tmp_path, limits=AskCounter(per_minute=1, per_hour=1)) as asks:
        ask = asks.admit(OPENING)
        await ask.begin()
        told: list[int] = []
        for epoch in range(1, 21):
            ask.reads([f"doc-{epoch % 2}"])
            if epoch > 2:  # at first it is lost before its first token
                ask.observe(Targets(2, 0, len(told), [epoch], b""))
                told.append(epoch)
            egress = Egress()
            egress.sent(Targets(2, 0, 0, [epoch], b""), 10)
            ask.end("the link was lost", egress)
            ask = asks.admit(msgspec.structs.replace(OPENING, session=epoch, epoch=epoch, targets=list(told)))
            await ask.begin()
        ask.end("stop", Egress())
        with pytest.raises(PacelineError, match="joined this answer 20 times again"):
            asks.admit(msgspec.structs.replace(OPENING, epoch=21, targets=list(told)))
        with pytest.raises(PacelineError, match="1 questions an hour"):
            asks.admit(OPENING)  # the same question, from its beginning
    (entry,) = logged(tmp_path)
    assert (entry.outcome, entry.tokens) == ("stop; joined again (20)", 18)
    assert (entry.documents, entry.sent) == (("doc-0", "doc-1"), {"targets": 200})


async def test_a_further_search_of_an_answer_is_a_question_of_its_own(tmp_path: Path) -> None:
    async with gate(tmp_path, limits=AskCounter(per_hour=2)) as asks:
        await asks.admit(OPENING).begin()
        further = msgspec.structs.replace(OPENING, targets=[5] * 16)
        await asks.admit(further, "Who keeps the key? The miller").begin()
        await asks.admit(further, "Who keeps the key? The miller").begin()
        with pytest.raises(PacelineError, match="2 questions an hour"):
            asks.admit(msgspec.structs.replace(OPENING, targets=[5] * 32), "Who keeps the key? The miller keeps it")
    assert [entry.question for entry in logged(tmp_path)] == ["Who keeps the key?", "Who keeps the key? The miller"]


# ---- the log --------------------------------------------------------------------------------------------------------
async def test_an_entry_is_on_disk_before_documents_are_read_and_completed_at_the_end(tmp_path: Path) -> None:
    async with gate(tmp_path) as asks:
        ask = asks.admit(OPENING)
        await ask.begin()
        (entry,) = logged(tmp_path)  # by another connection, while the agent runs
        assert (entry.asker, entry.question, entry.outcome) == ("notebook", "Who keeps the key?", None)
        egress = Egress()
        egress.sent(Targets(2, 0, 0, [5], b""), 11)
        ask.reads(["doc-2", "doc-1", "doc-2"])
        ask.end("stop", egress)
        ask.end("stop", egress)
    (entry,) = logged(tmp_path)
    assert (entry.documents, entry.sent, entry.outcome) == (("doc-1", "doc-2"), {"targets": 11}, "stop")
    assert not entry.refused and entry.times == 1


def test_an_entry_that_a_crash_left_under_way_says_so(tmp_path: Path) -> None:
    with closing(ActivityLog(tmp_path)) as log:
        log.begin(CloudQuestion("", "x", "document-private"))
    CloudAsks(EVERYBODY, None, log := ActivityLog(tmp_path))
    (entry,) = log.recent(5)
    assert entry.outcome == "the program ended"
    log.close()


async def test_without_a_log_no_question_is_answered(tmp_path: Path) -> None:
    async with gate(tmp_path) as asks:
        ask = asks.admit(OPENING)
        with closing(sqlite3.connect(tmp_path / FILE)) as other:
            other.execute("DROP TABLE questions")
        with pytest.raises(ConfigError):
            await ask.begin()


async def test_a_flood_of_refusals_is_few_entries_and_all_are_counted(tmp_path: Path) -> None:
    async with gate(tmp_path, NOBODY) as asks:
        for number in range(3000):
            asks.refuse(msgspec.structs.replace(OPENING, asker=f"key {number % 40}"), "its owner lets no cloud ask it")
    entries = logged(tmp_path)
    assert len(entries) == 17 and sum(entry.times for entry in entries) == 3000
    assert all(entry.refused for entry in entries)


def test_the_log_is_bounded_and_refusals_push_out_no_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(activity_module, "MAX_ENTRIES", 8)
    monkeypatch.setattr(activity_module, "_TRIM_EVERY", 4)
    with closing(ActivityLog(tmp_path)) as log:
        read = CloudQuestion("", "a" * 5000, "document-private")
        for _ in range(3):
            log.begin(read)
        for number in range(40):
            log.refuse(CloudQuestion("", str(number), "open"), f"no {number}", 2)
        kept = log.recent(100)
        assert sum(not entry.refused for entry in kept) == 3 and sum(entry.refused for entry in kept) <= 8
        assert kept[-1].question == "39" and max(len(entry.question) for entry in kept) == 1000
        for _ in range(40):
            log.begin(read)
        assert sum(not entry.refused for entry in log.recent(100)) <= 8
        clock.now += 91 * 86_400
        for _ in range(4):
            log.begin(read)
        assert len(log.recent(100)) <= 4
