"""The guard of the policy on several threads: the event loop spends and remembers while others decide."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from paceline.core.policy import Budget, DocumentRule, Pattern, Policy, Privacy
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import fake_model
from paceline.errors import StorageError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.readable import Known, RuledDocuments
from paceline.runtime import policy as guarding
from paceline.runtime.node import Node
from paceline.runtime.policy import PolicyGuard, PolicyState
from paceline.runtime.resources import Company, NodeParts
from tests.clocks import read_from
from tests.requests import a_request

HELD = "Velda will have thirty crowns for the lower room in May."
RULES = Policy(
    (DocumentRule("never leaves", Pattern.parse("velda.md", "/home/ann")),), budgets={"bytes": 9.0, "joules": 9.0}
)
ASKED = a_request(({"role": "user", "content": f"Is it true? {HELD}"},), SamplingParams(), 4)


def test_what_is_spent_while_a_request_is_decided_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, usual = PolicyGuard("device", RULES), PolicyState.used

    def spent_behind(state: PolicyState) -> dict[Budget, float]:
        found = usual(state)
        guard.spend("bytes", 9.0)  # as the event loop does
        return found

    monkeypatch.setattr(PolicyState, "used", spent_behind)
    guard._see_others()
    monkeypatch.undo()
    assert guard.used_up() == ["bytes"]
    guard._see_others()
    assert guard.used_up() == ["bytes"] and guard.left()["bytes"] == 0.0
    guard.close()


def test_a_request_is_held_here_where_what_rules_hold_cannot_be_read_whatever_is_written_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = PolicyGuard("device", RULES, tmp_path)
    on_writer = guard._on_writer

    def away(*_: object) -> tuple[int, dict[bytes, Privacy]]:
        on_writer(guard._write)  # at the end of another answer
        raise StorageError("it cannot be reached", away=True)

    def and_all_else(work: Callable[[], None]) -> Future[None]:
        done = on_writer(work)
        done.result()
        on_writer(lambda: None).result()
        return done

    monkeypatch.setattr(PolicyState, "marks", away)
    monkeypatch.setattr(guard, "_on_writer", and_all_else)
    assert not guard._see_others() and guard.used_up() == ["bytes", "joules"]
    monkeypatch.undo()
    assert guard._see_others() and not guard.used_up()
    guard.close()


@pytest.mark.anyio
async def test_who_may_read_what_is_asked_of_no_disk_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, readers = PolicyState.confirmed, list[threading.Thread]()

    def confirmed(state: PolicyState) -> frozenset[bytes]:
        readers.append(threading.current_thread())
        return usual(state)

    monkeypatch.setattr(PolicyState, "confirmed", confirmed)
    rules = Policy((DocumentRule("ask me", Pattern.parse("velda.md", "/home/ann")),))
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        store.add_text("velda.md", HELD, zone="device")
        guard = PolicyGuard("device", rules)
        readable = guard.readable(store, "ann")
        assert readable is not None and await asyncio.to_thread(readable.search, HELD, 3) == []
        assert readable.asked and readers and threading.current_thread() not in readers
        guard.close()


@pytest.mark.anyio
async def test_what_would_happen_is_found_out_on_no_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, readers = RuledDocuments.known, list[threading.Thread]()

    def known(ruled: RuledDocuments) -> Known:
        readers.append(threading.current_thread())
        return usual(ruled)

    monkeypatch.setattr(RuledDocuments, "known", known)
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        store.add_text("velda.md", HELD, zone="device")
        parts = NodeParts(company=Company(policy=PolicyGuard("device", RULES)))
        async with asyncio.timeout(60), Node("device", fake_model(7), store, parts) as node:
            told = await node.explain(ASKED, None)
        assert told.documents == [("velda.md", ("never leaves: velda.md",))]
        assert threading.current_thread() not in readers


def test_a_text_that_is_remembered_again_is_held_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = PolicyGuard("device", RULES)
    guard.remember(HELD, "local-only")
    usual, levels = guarding.strictest, list[Privacy]()

    def decided_in_the_middle(*given: Privacy) -> Privacy:
        monkeypatch.undo()
        deciding = threading.Thread(target=lambda: levels.append(guard._held(ASKED)))
        deciding.start()
        deciding.join()
        return usual(*given)

    monkeypatch.setattr(guarding, "strictest", decided_in_the_middle)
    guard.remember(HELD, "local-only")
    guard.close()
    assert levels == ["local-only"]


def test_what_was_spent_yesterday_does_not_count_when_the_day_turns_while_a_request_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1e9]
    read_from(monkeypatch, lambda: clock[0], guarding)
    guard, usual = PolicyGuard("device", RULES), PolicyState.used
    guard.spend("bytes", 9.0)

    def turned_behind(state: PolicyState) -> dict[Budget, float]:
        found = usual(state)
        monkeypatch.undo()
        clock[0] += 86_400.0
        return found

    monkeypatch.setattr(PolicyState, "used", turned_behind)
    guard._see_others()
    assert not guard.used_up()
    guard.close()
