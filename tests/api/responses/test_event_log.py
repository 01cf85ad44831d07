"""The event log: order, group commit, failures, deletion and retention."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.api.http.errors import Failure
from paceline.api.responses import log as event_writer
from paceline.api.responses.log import TAIL_ROWS, EventLog, LiveEvents, Retention
from paceline.api.responses.store import EventRow, EventStore, LogBatch, ResponseRecord
from paceline.core.fair import fair_share
from paceline.errors import ConfigError, PacelineError, StorageError
from paceline.sealing import PLAIN, StoreSeal

pytestmark = pytest.mark.anyio


def record(response: str, created: float | None = None, owner: str = "key", request: bytes = b"{}") -> ResponseRecord:
    return ResponseRecord(response, owner, time.time() if created is None else created, None, request)


def events(*texts: str) -> list[tuple[str, bytes]]:
    return [("delta", json.dumps(text).encode()) for text in texts]


async def rest_of(reader: AsyncIterator[list[EventRow]]) -> list[EventRow]:
    return [row async for batch in reader for row in batch]


async def written(
    log: EventLog, response: str, *texts: str, created: float | None = None, owner: str = "key", request: bytes = b"{}"
) -> LiveEvents:
    live = log.begin(record(response, created, owner, request), stored=True)
    await log.append(live, events(*texts), last=True)
    await log.wait_committed(live)
    return live


@pytest.fixture(params=[PLAIN, StoreSeal.new(bytes(32))], ids=["plain", "sealed"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EventLog]:
    made = EventLog(tmp_path, seal=request.param)
    yield made
    made.close()


async def test_rows_are_read_once_and_in_order_by_every_reader(log: EventLog) -> None:
    live = log.begin(record("a"), stored=True)
    early = asyncio.create_task(rest_of(log.follow("a")))
    texts = [str(number) for number in range(3 * TAIL_ROWS)]
    for text in texts:
        await log.append(live, events(text))
    await log.append(live, events("end"), last=True)
    await log.wait_committed(live)
    everything = [EventRow(i, "delta", json.dumps(text).encode()) for i, text in enumerate([*texts, "end"])]
    assert await early == everything
    assert await rest_of(log.follow("a")) == everything
    assert await rest_of(log.follow("a", len(texts) - 1)) == everything[-1:]
    assert await rest_of(log.follow("a", len(texts) + 5)) == []


async def test_a_running_response_is_read_from_its_beginning_in_the_file(log: EventLog) -> None:
    live = log.begin(record("a"), stored=True)
    await log.append(live, events(*map(str, range(2 * TAIL_ROWS))))
    reader = log.follow("a")
    rows: list[EventRow] = []
    while len(rows) < 2 * TAIL_ROWS:
        rows += await anext(reader)
    rest = asyncio.ensure_future(rest_of(reader))
    await asyncio.sleep(0.01)
    assert not rest.done(), "it waits for the next rows"
    log.append_nowait(live, events("end"), last=True)
    rows += await rest
    assert [row.sequence for row in rows] == list(range(2 * TAIL_ROWS + 1))


@pytest.fixture
def written_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """So many rows have been written by each transaction."""
    sizes: list[int] = []
    write = EventStore.write

    def counted(self: EventStore, batch: LogBatch) -> set[str]:
        lost = write(self, batch)
        sizes.append(len(batch.events))
        return lost

    monkeypatch.setattr(EventStore, "write", counted)
    return sizes


async def test_rows_are_read_after_they_are_committed(log: EventLog, written_rows: list[int]) -> None:
    live = log.begin(record("a"), stored=True)
    await log.append(live, events("one", "two"), last=True)
    assert len(await anext(log.follow("a"))) == 2
    assert written_rows == [2]


async def test_waiting_appends_are_written_in_one_transaction(log: EventLog, written_rows: list[int]) -> None:
    held = threading.Event()
    busy = asyncio.create_task(log.query(lambda: held.wait(30)))
    await asyncio.sleep(0)
    all_live = [log.begin(record(str(number)), stored=True) for number in range(64)]
    for live in all_live:
        log.append_nowait(live, events("x", "y"), last=True)
    held.set()
    await busy
    for live in all_live:
        await log.wait_committed(live)
    assert written_rows == [128]


async def test_a_response_that_is_not_stored_leaves_nothing(log: EventLog, tmp_path: Path) -> None:
    live = log.begin(record("a"), stored=False)
    reader = log.follow(live.record.id)
    await log.append(live, events("secret"))
    assert await log.find("a") is None
    await log.append(live, events("secret"), last=True)
    assert len(await rest_of(reader)) == 2
    assert await log.find("a") is None and log.running("a") is None
    log.close()
    assert all(b"secret" not in file.read_bytes() for file in tmp_path.iterdir())


async def there(log: EventLog, *responses: str) -> set[str]:
    return {response for response in responses if await log.last(response) is not None}


@pytest.mark.parametrize(("text", "request_"), [("x" * 1000, b"{}"), ("x", b"x" * 1000)], ids=["answers", "requests"])
async def test_the_oldest_are_deleted_when_there_are_too_many_bytes(tmp_path: Path, text: str, request_: bytes) -> None:
    log = EventLog(tmp_path, Retention(max_bytes=2500))
    names = [str(index) for index in range(6)]
    for name in names:
        await written(log, name, text, created=time.time() - 60 + int(name), request=request_)
    assert await there(log, *names) == {"4", "5"}
    log.close()


@pytest.mark.parametrize("step", [1, event_writer.SHRINK_STEP])
async def test_an_owner_below_the_fair_share_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(event_writer, "SHRINK_STEP", step)
    log = EventLog(tmp_path, Retention(max_bytes=20_000))
    for number in range(3):
        await written(log, f"ann{number}", "x" * 1000, created=time.time() - 600 + number, owner="ann")
    for number in range(60):
        await written(log, f"bert{number}", "x" * 1000, created=time.time() - 300 + number, owner="bert")
    assert len(await there(log, *(f"ann{number}" for number in range(3)))) == 3
    kept = await there(log, *(f"bert{number}" for number in range(60)))
    assert kept == {f"bert{number}" for number in range(60 - len(kept), 60)} and len(kept) >= 14
    log.close()


@pytest.mark.parametrize(
    ("held", "room", "cap"),
    [([], 10, 0), ([7], 5, 5), ([1, 9], 10, 9), ([1, 9], 8, 7), ([5, 5, 5], 9, 3), ([1, 2, 9, 9], 11, 4), ([3], 0, 0)],
)
def test_fair_share_is_the_highest_cap_that_fits(held: list[int], room: int, cap: int) -> None:
    assert fair_share(held, room) == cap
    assert sum(min(size, cap) for size in held) <= room or sum(held) <= room


async def test_old_responses_are_deleted_from_a_busy_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "SWEEP_INTERVAL_S", 0.1)
    log = EventLog(tmp_path, Retention(max_age=0.2))
    await written(log, "old", "x")
    async with asyncio.timeout(30):
        while await there(log, "old"):  # queries without a pause
            pass
    log.close()


async def test_an_abandoned_response_is_deleted_and_a_running_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_writer, "SWEEP_INTERVAL_S", 0.05)
    log = EventLog(tmp_path, Retention(max_age=100))
    for name, age in (("lost", 101.0), ("young", 99.0), ("live", 101.0)):
        live = log.begin(record(name, time.time() - age - event_writer.ABANDONED_S), stored=True)
        await log.append(live, events("x"))
        if name != "live":
            del log._live[name]  # as after a failed write of its end
    async with asyncio.timeout(30):
        while await there(log, "lost"):
            pass
    assert await there(log, "young", "live") == {"young", "live"}
    log.close()


async def test_an_old_response_is_not_found_and_is_deleted(tmp_path: Path) -> None:
    log = EventLog(tmp_path, Retention(max_age=100))
    await written(log, "old", "x", created=time.time() - 101)
    await written(log, "new", "x")
    assert await log.find("old") is None and await log.find("new") is not None
    log.close()
    again = EventLog(tmp_path, Retention(max_age=100))
    assert await again.last("old") is None and await again.last("new") is not None
    again.close()


async def test_a_failed_write_fails_its_responses_only(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    write = EventStore.write

    def refusing(*_: object) -> None:
        raise ConfigError("The disk is full.")

    live = log.begin(record("a"), stored=True)
    monkeypatch.setattr(EventStore, "write", refusing)
    await log.append(live, events("lost"))
    with pytest.raises(PacelineError, match="could not be stored"):
        await anext(log.follow("a"))
    monkeypatch.setattr(EventStore, "write", write)
    with pytest.raises(PacelineError, match="could not be stored"):
        await log.append(live, events("more"))
    log.append_nowait(live, events("end"), last=True)
    assert log.running("a") is None and await log.find("a") is None
    await written(log, "b", "fine")
    assert len(await rest_of(log.follow("b"))) == 1


async def test_a_response_that_another_program_deletes_takes_no_other_of_its_batch_with_it(tmp_path: Path) -> None:
    rows = EventStore(tmp_path)
    rows.allow_others()
    other = EventStore(tmp_path)
    both = ["deleted", "kept"]
    assert rows.write(LogBatch([*map(record, both)], [(name, 0, "delta", b"1") for name in both], [])) == set()
    other.delete("deleted")
    more = LogBatch(
        [record("new")], [(name, 1, "delta", b"2") for name in [*both, "new"]], [(name, 2) for name in both]
    )
    assert rows.write(more) == {"deleted"}
    assert [[row.sequence for row in other.read(name, -1, 9)] for name in [*both, "new"]] == [[], [0, 1], [1]]
    assert other.find("deleted") is None
    rows.close()
    other.close()


async def test_what_is_written_of_a_response_that_another_program_has_deleted_tells_its_reader(tmp_path: Path) -> None:
    log, other = EventLog(tmp_path), EventLog(tmp_path)
    live = log.begin(record("deleted"), stored=True)
    await log.append(live, events("begun"))
    reader = log.follow("deleted")
    assert len(await anext(reader)) == 1
    await other.delete("deleted")
    log.append_nowait(live, events("more", "end"), last=True)
    with pytest.raises(PacelineError, match="was deleted while"):
        await rest_of(reader)
    log.close()
    other.close()


async def test_the_same_number_is_never_written_twice(tmp_path: Path) -> None:
    rows = EventStore(tmp_path)
    rows.write(LogBatch([record("a")], [("a", 0, "delta", b"1")], []))
    with pytest.raises(ConfigError, match="UNIQUE"):
        rows.write(LogBatch([], [("a", 0, "delta", b"2")], []))
    assert rows.read("a", -1, 10) == [EventRow(0, "delta", b"1")]
    rows.close()


async def test_a_state_directory_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        EventLog(tmp_path / "file")


async def test_a_second_process_does_not_end_responses_of_the_first(tmp_path: Path) -> None:
    first = EventLog(tmp_path)
    live = first.begin(record("a"), stored=True)
    await first.append(live, [("response.created", b'{"response":{"output":[]}}')])
    await anext(first.follow("a"))
    second = EventLog(tmp_path)
    assert len(await second.all("a")) == 1
    second.close()
    first.close()
    third = EventLog(tmp_path)
    assert [row.type for row in await third.all("a")] == ["response.created", "response.failed"]
    third.close()


async def test_a_row_that_is_appended_as_the_log_closes_is_written_and_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path)
    live = log.begin(record("a"), stored=True)
    monkeypatch.setattr(log._writer, "_submit", lambda _: None)  # as behind the end of the thread
    log.append_nowait(live, events("one"))
    log.close()
    log.append_nowait(live, events("two"))
    with pytest.raises(PacelineError, match="shutting down"):
        await live.until(lambda: live.committed == live.length)
    with closing(EventStore(tmp_path)) as store:
        assert [row.data for row in store.read("a", -1, -1)] == [b'"one"']


async def test_what_cannot_be_ended_is_left_to_others(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(500, "It cannot be continued.", "server_error")
    live = log.begin(record("resp_1"), stored=True)
    log.append_nowait(live, [("response.created", b'{"response":{"output":[]}}')])
    await log.wait_begun(live)
    with monkeypatch.context() as away:

        def read(*_: object) -> list[EventRow]:
            raise StorageError("It cannot be reached.", away=True)

        away.setattr(log._store, "read", read)
        assert await log.fail(live, failure) is None
    assert log.running("resp_1") is None and live.lost and isinstance(live.failure, event_writer.TakenOver)
    again = log.begin(record("resp_2"), stored=True)
    log.append_nowait(again, [("response.created", b'{"response":{"output":[]}}')])
    await log.wait_begun(again)
    ended = await log.fail(again, failure)
    assert ended is not None and ended["status"] == "failed"
    await log.wait_committed(again)
