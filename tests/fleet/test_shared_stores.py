"""Stores and rules of two servers in one database: what one changes the other knows, and no write passes the fence."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg_pool import PoolTimeout

from paceline import postgres as postgres_module
from paceline import sql
from paceline.api.http.auth import Keyring
from paceline.api.responses import log as event_log
from paceline.api.responses.log import EventLog, LiveEvents
from paceline.api.responses.store import EventStore, LogBatch, ResponseRecord, Turn
from paceline.core.policy import DocumentFacts, DocumentRule, Pattern, Policy
from paceline.errors import ConfigError, RequestError, StorageError
from paceline.fleet import Fleet
from paceline.postgres import Postgres, PostgresConnection
from paceline.rag.store.readable import RuledDocument
from paceline.runtime.policy import PolicyGuard
from paceline.settings import ServerSettings
from paceline.settings_sources import resolve
from server.devices import Registry
from server.keys import Keys
from server.state import StateTables
from tests.postgres import RealPostgres
from tests.requests import a_request

pytestmark = pytest.mark.anyio

Servers = tuple[Postgres, Postgres]
WAIT_S = 30.0


def eventually(holds: Callable[[], bool]) -> None:
    """Waits on the fleet's own beats, which cannot be hurried."""
    until, pause = time.monotonic() + WAIT_S, threading.Event()
    while not holds():
        assert time.monotonic() < until, "it never held"
        pause.wait(0.01)


def record(response: str) -> ResponseRecord:
    return ResponseRecord(response, "key", time.time(), None, b"{}")


def begin(store: EventStore) -> None:
    """Write the first event of a response."""
    assert store.write(LogBatch([record("resp_1")], [("resp_1", 0, "a", b"0")], [], epochs={"resp_1": 1})) == set()


async def begun(log: EventLog, name: str = "resp_1") -> LiveEvents:
    live = log.begin(record(name), stored=True)
    await log.append(live, [("a", b"0")])
    await log.wait_begun(live)
    return live


@pytest.fixture
def stores(servers: Servers) -> Iterator[tuple[EventStore, EventStore]]:
    with closing(EventStore(servers[0])) as first, closing(EventStore(servers[1])) as second:
        yield first, second


def fleet_of(postgres: Postgres) -> Fleet:
    assert postgres.fleet is not None
    return postgres.fleet


def test_a_key_that_is_revoked_at_one_server_is_refused_at_the_other(servers: Servers) -> None:
    first, second = servers
    with Keys(second).current() as stored:
        keyring = Keyring({}, stored)
        key = Keys(first).create("notebook")
        eventually(lambda: keyring.identify(f"Bearer {key}") is not None)
        Keys(first).revoke("notebook")
        eventually(lambda: keyring.identify(f"Bearer {key}") is None)


def test_a_taken_response_is_written_by_its_taker_alone(
    servers: Servers, stores: tuple[EventStore, EventStore]
) -> None:
    first, second = stores
    begin(first)
    assert second.take_over(list) == [], "its server is alive"
    first.release([])
    ((_, epoch, rows),) = second.take_over(list)
    assert (epoch, [row.data for row in rows]) == (2, [b"0"])
    first.conversations.create(ResponseRecord("conv_1", "key", 1.0, None, b"{}"), [])
    stale, turns = [("resp_1", 1, "response.failed", b"stale")], {"resp_1": Turn("conv_1", (b"stale",))}
    for records in ([], [record("resp_1")]) * 20:
        assert first.write(LogBatch(records, stale, [("resp_1", 1)], turns, epochs={"resp_1": 1})) == {"resp_1"}
        first.hand_over("resp_1", "another", 1)
    assert first.read("conv_1", -1, -1) == [] and first.holder("resp_1") == fleet_of(servers[1]).id
    assert second.write(LogBatch([], [("resp_1", 1, "a", b"1")], [("resp_1", 2)], epochs={"resp_1": 2})) == set()
    assert [row.data for row in first.read("resp_1", -1, -1)] == [b"0", b"1"]
    assert first.take_over(list) == second.take_over(list) == [], "it has ended"


def test_a_server_that_stands_still_in_a_transaction_keeps_no_response(
    servers: Servers, stores: tuple[EventStore, EventStore]
) -> None:
    """Its locks end with its lease, and what it goes on with later is refused as any late write."""
    first, second = stores
    begin(first)
    first.conversations.create(ResponseRecord("conv_1", "key", 1.0, None, b"{}"), [])
    add, taken = first.conversations.add, []

    def stands_still(conversation: str, items: Sequence[bytes], now: float) -> int:
        first.conversations.add = add  # type: ignore[method-assign]
        fleet_of(servers[0]).close()  # its lease ends
        eventually(lambda: bool(taken.extend(second.take_over(list)) or taken))
        return add(conversation, items, now)

    first.conversations.add = stands_still  # type: ignore[method-assign]
    late, turns = [("resp_1", 1, "a", b"late")], {"resp_1": Turn("conv_1", (b"said",))}
    assert first.write(LogBatch([], late, [("resp_1", 5)], turns, epochs={"resp_1": 1})) == {"resp_1"}
    assert [epoch for _, epoch, _ in taken] == [2] and len(second.read("resp_1", -1, -1)) == 1
    assert second.read("conv_1", -1, -1) == []


def test_a_write_whose_commit_was_not_known_is_repeated_without_harm(servers: Servers) -> None:
    with closing(EventStore(servers[0])) as store:
        store.conversations.create(ResponseRecord("conv_1", "key", 1.0, None, b"{}"), [])
        turns = {"resp_1": Turn("conv_1", (b"said",))}
        for _ in range(2):
            batch = LogBatch([record("resp_1")], [("resp_1", 0, "a", b"0")], [("resp_1", 1)], turns, {"resp_1": 1})
            assert store.write(batch) == set()
        assert [row.data for row in store.read("conv_1", -1, -1)] == [b"said"]


async def test_a_follower_misses_no_end_of_another_servers_response(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(EventStore(servers[0])) as store, closing(EventLog(servers[1])) as log:
        begin(store)
        holder = log._store.holder

        def ended_meanwhile(response: str) -> str | None:
            end = [("resp_1", 1, "response.failed", b'{"response":{"output":[]}}')]
            store.write(LogBatch([], end, [("resp_1", 2)], epochs={"resp_1": 1}))  # after its rows were read
            return holder(response)

        monkeypatch.setattr(log._store, "holder", ended_meanwhile)
        read = [row.sequence async for rows in log.follow("resp_1") for row in rows]
        assert read == [0, 1]


async def test_a_follower_of_a_response_that_another_server_deletes_is_told(servers: Servers) -> None:
    with closing(EventStore(servers[0])) as store, closing(EventLog(servers[1])) as log:
        begin(store)
        following = log.follow("resp_1")
        assert [row.sequence for row in await anext(following)] == [0]
        store.delete("resp_1")  # its end with it
        with pytest.raises(RequestError, match="deleted while it was read"):
            await anext(following)


async def test_rows_wait_for_a_commit_and_beginnings_and_ends_do_not(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "GROUP_S", 3600.0)
    with closing(EventStore(servers[1])) as other:
        with closing(EventLog(servers[0])) as log:
            lives = [await begun(log, f"resp_{number}") for number in range(2)]
            for data in (b"1", b"2"):
                await log.append(lives[0], [("a", data)])
            assert len(await log.all("resp_0")) == 1, "a query waits for no commit"
            await log.append(lives[1], [("response.failed", b"{}")], last=True)
            await log.wait_committed(lives[1])
            assert len(await log.all("resp_0")) == 3, "written with the end of another"
            await log.append(lives[0], [("a", b"3")])
            await begun(log, "resp_2")
            assert len(await log.all("resp_0")) == 4
            await log.append(lives[0], [("a", b"4")])
        assert len(other.read("resp_0", -1, -1)) == 5, "nothing is left at the end"


async def test_a_response_that_begins_while_others_are_taken_over_stays_its_writers(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, has_begun, taken = asyncio.get_running_loop(), threading.Event(), list[str]()
    execute = PostgresConnection.execute
    with closing(EventLog(servers[0])) as log:

        def begins_behind(rows: PostgresConnection, statement: str, parameters: Sequence[Any] = (), /) -> Any:
            if "NOT IN (SELECT id FROM servers" in statement and not has_begun.is_set():
                asyncio.run_coroutine_threadsafe(begun(log), loop).result()
                has_begun.set()
            return execute(rows, statement, parameters)

        monkeypatch.setattr(PostgresConnection, "execute", begins_behind)
        log.take_over(lambda record, *_: taken.append(record.id))
        while not has_begun.is_set():
            await asyncio.sleep(0.001)
        monkeypatch.undo()
        live = log.running("resp_1")
        assert live is not None
        await log.append(live, [("response.failed", b"{}")], last=True)
        await log.wait_committed(live)
        assert not taken and live.epoch == 1


async def test_a_server_that_leaves_does_not_take_over_what_it_abandons(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, found, resumed = asyncio.get_running_loop(), list[str](), list[str]()
    with closing(EventLog(servers[0])) as log:
        take_over = log._store.take_over

        async def abandon() -> None:
            log.abandon(await begun(log))

        def leaves_behind(mine: Callable[[], Collection[str]]) -> Any:
            asyncio.run_coroutine_threadsafe(abandon(), loop).result()
            taken = take_over(mine)
            log.leaving = True  # before what it has found can begin
            found.extend(each.id for each, _, _ in taken)
            return taken

        monkeypatch.setattr(log._store, "take_over", leaves_behind)
        log.take_over(lambda taken, *_: resumed.append(taken.id))
        beats = list[int]()
        fleet_of(servers[0]).each_beat(lambda: beats.append(0))
        await asyncio.to_thread(eventually, lambda: len(beats) > 2)
        assert (found, resumed) == (["resp_1"], [])


def test_two_servers_take_over_each_response_once(stores: tuple[EventStore, EventStore]) -> None:
    names = sorted(f"resp_{number}" for number in range(20))
    for name in names:
        stores[0].write(LogBatch([record(name)], [(name, 0, "a", b"0")], [], epochs={name: 1}))
    stores[0].release([])
    taken: list[list[str]] = [[], []]

    def take(number: int, store: EventStore) -> None:
        while found := store.take_over(lambda: taken[number]):
            taken[number] += [each.id for each, _, _ in found]

    with ThreadPoolExecutor(2) as threads:
        _ = [*threads.map(take, range(2), stores)]
    assert sorted(taken[0] + taken[1]) == names


def test_a_server_that_has_left_is_no_place_of_a_device(servers: Servers) -> None:
    first, second = fleet_of(servers[0]), fleet_of(servers[1])
    first.linked("phone")
    eventually(lambda: second.where("phone") is not None)
    found = second.where("phone")
    assert found is not None and found.url == "http://a" and second.where(None) == found
    assert first.where("phone") is None
    second.linked("phone")  # it has come here
    eventually(lambda: first.where("phone") is not None)
    first.linked("phone", is_here=False)  # which is told late
    eventually(lambda: not first._untold)
    assert first.where("phone") is not None
    second.close()
    assert first.where("phone") is None and [each.url for each in first.servers()] == ["http://a"]


def test_a_database_that_goes_and_comes_is_waited_for(postgres: RealPostgres, servers: Servers) -> None:
    with closing(EventStore(servers[0])) as store, Keys(servers[1]).current() as stored:
        begin(store)
        written: list[set[str]] = []

        def write() -> None:
            for number in range(1, 50):
                written.append(store.write(LogBatch([], [("resp_1", number, "a", b"1")], [], epochs={"resp_1": 1})))

        writer = threading.Thread(target=write)
        writer.start()
        postgres.kill()

        def refused() -> bool:
            try:
                stored()
            except StorageError as error:
                return error.away
            return False

        eventually(refused)  # a key may have been revoked meanwhile
        postgres.start()
        writer.join()
        assert len(store.read("resp_1", -1, -1)) == 50 and written == [set()] * 49
        eventually(lambda: not refused())


def test_all_who_ask_while_the_database_is_away_wait_as_long_as_one(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, asked, tried, is_over = count(), threading.Semaphore(0), count(1), threading.Event()

    def monotonic() -> float:
        asked.release()
        return next(times)

    def getconn() -> object:
        number = next(tried)
        assert is_over.wait(WAIT_S)
        raise PoolTimeout(f"no connection: {number}")

    with closing(sql.OwnRows(servers[0].place("test", "a test"), 1, [], "")) as rows, monkeypatch.context() as away:
        away.setattr(postgres_module, "time", SimpleNamespace(monotonic=monotonic))
        away.setattr(servers[0].pool, "getconn", getconn)

        def ask() -> None:
            with pytest.raises(StorageError, match="no connection") as refused, rows.changing():
                pass
            assert refused.value.away

        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            for _ in asking:
                assert asked.acquire(timeout=WAIT_S)
            is_over.set()
            for each in asking:
                each.result()
        assert next(tried) == 2, "one of them has waited for all"
        ask()
        assert next(tried) == 4, "whoever asks later waits anew"


def test_tables_of_another_version_are_refused(servers: Servers) -> None:
    place = servers[0].place("test", "a test")
    StateTables(place, ["CREATE TABLE one (id INTEGER PRIMARY KEY)"], "test")
    with closing(place.connect()) as rows, sql.transaction(rows):
        rows.set_version(9)
    with pytest.raises(ConfigError, match="format 9"):
        StateTables(place, [], "test")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://paceline:hunter2@127.0.0.1:1/paceline",
        "postgresql://paceline:a@hunter2@127.0.0.1:1/paceline",
        "postgresql://paceline:a/hunter2@127.0.0.1:1/paceline",
        "postgresql://paceline:1/hunter2@127.0.0.1:1/paceline",
        "postgresql://paceline:a#hunter2@127.0.0.1:1/paceline",
        "postgresql://paceline:hunter2%zz@127.0.0.1:1/paceline",
        "postgresql://paceline:hunter2@[::1/paceline",
        "postgresql://paceline:b@127.0.0.1:hunter2/paceline",
        "mysql://paceline:hunter2@127.0.0.1/paceline",
        "host=127.0.0.1 port=1 password=hunter2",
        "hunter2",
        "",
    ],
)
def test_what_cannot_be_used_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"check --database|postgresql://USER:PASSWORD@HOST:PORT/NAME") as caught:
        Postgres(url)
    assert "hunter2" not in str(caught.value)
    try:
        resolve(ServerSettings, {"database": url}, {}, None)
    except ConfigError as error:
        assert "USER:PASSWORD" in str(error) and "hunter2" not in str(error)


@pytest.mark.parametrize(("seconds", "how"), [(7200.0, "7200 s ahead of"), (-90.0, "90 s behind")])
def test_a_server_with_another_clock_does_not_join(
    url: str, seconds: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its clock it would delete what others have kept."""
    right = time.time
    with closing(Postgres(url)) as postgres, monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: right() + seconds)
        with pytest.raises(ConfigError, match=how):
            postgres.join("http://127.0.0.1:9")


def test_devices_enrol_at_any_server_and_a_name_has_one_code(servers: Servers) -> None:
    first, second = Registry(servers[0]), Registry(servers[1])
    first.add("phone")
    with second.watching() as version:
        before = version()
        first.add("phone")
        eventually(lambda: version() != before)
    assert [device.name for device in second.devices()] == ["phone"]
    assert second.revoke("phone") and first.devices() == []


# ---- the rules of an owner over several servers: what one has seen holds at the others ------------------------------
TEXT = "The combination of the safe behind the picture is 34 right, 12 left, 7 right, as the locksmith wrote down."
ASKED = ({"role": "user", "content": "What did the locksmith write?"},)
RULES = Policy(
    (DocumentRule("never leaves", Pattern.parse("safe.md", "/home/me")),),
    budgets={"cloud_tokens": 100.0, "bytes": 1e6},
)
DOCUMENT = RuledDocument("doc-1", "safe.md", "safe", DocumentFacts(("/home/me/safe.md",)), RULES.rules)


@contextmanager
def guards(one: Postgres, other: Postgres) -> Iterator[tuple[PolicyGuard, PolicyGuard]]:
    sides = [closing(PolicyGuard("cloud", RULES, each)) for each in (one, other)]
    with sides[0] as first, sides[1] as second:
        yield first, second


def level_at(guard: PolicyGuard, *said: str) -> str:
    request = a_request(messages=(*({"role": "user", "content": each} for each in said), *ASKED), privacy="open")
    return guard.decide(request, "m").level


def test_what_one_server_has_written_is_held_at_the_other_and_budgets_are_of_both(
    servers: tuple[Postgres, Postgres],
) -> None:
    with guards(*servers) as (first, second):
        assert level_at(second, TEXT) == "open"
        first.remember(TEXT, "local-only")
        first.written().result()
        assert level_at(second, f"Shorten this: {TEXT}") == "local-only" and level_at(second, "Hello") == "open"
        first.spend("cloud_tokens", 60.0)
        second.spend("cloud_tokens", 30.0)
        first._save()
        first.written().result()
        assert level_at(second, "Hello") == "open" and second.left()["cloud_tokens"] == 10.0
        second.spend("cloud_tokens", 10.0)
        assert level_at(second, "Hello") == "local-only"
        assert second.state.confirmed() == frozenset()
        first.state.confirm(DOCUMENT)
        assert second.state.mark(DOCUMENT.identity) in second.state.confirmed()


def test_while_the_database_is_away_nothing_leaves_and_what_was_remembered_is_kept_for_its_return(
    postgres: RealPostgres, servers: tuple[Postgres, Postgres]
) -> None:
    with guards(*servers) as (first, second):
        postgres.kill()
        try:
            first.remember(TEXT, "local-only")
            assert level_at(first, "Hello") == "local-only" and [*first.used_up()] == ["cloud_tokens", "bytes"]
        finally:
            postgres.start()
        assert level_at(first, "Hello") == "open", "no server needs a restart"
        assert level_at(second, TEXT) == "local-only"
