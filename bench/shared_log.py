"""Costs of a token in the log of responses: in memory, in a file, and in PostgreSQL for several servers.

`python -m bench.shared_log` starts a PostgreSQL of its own, with fsync. Writers drive `EventStore.write`, each in a
process, as fast as it goes: a transaction holds one event of each answer that runs, as steps of one engine make them.
Then from these costs: what a fleet of many answers and devices asks of one database.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import psycopg

from paceline.api.responses.store import EventStore, LogBatch, ResponseRecord, StoredEvent
from paceline.postgres import Postgres
from paceline.sql import Home

if TYPE_CHECKING:
    from tests.postgres import RealPostgres

ANSWERS = (1, 16, 64, 256)  # at once, of one writer
WRITERS = (1, 2, 4)
SHARED = 64  # answers of each of several writers
SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Cost:
    tokens: int
    transactions: int
    seconds: float
    writer_s: float  # of processor time, all writers


def event(sequence: int) -> bytes:
    """An event of one token, as `paceline.api.responses.events` makes it."""
    told = {
        "type": "response.output_text.delta",
        "sequence_number": sequence,
        "item_id": "msg_0123456789abcdef0123456789abcdef",
        "output_index": 0,
        "content_index": 0,
        "delta": " bicycle",
        "logprobs": [],
    }
    return json.dumps(told, separators=(",", ":")).encode()


def drive(store: EventStore, answers: int, seconds: float, name: str = "") -> Cost:
    """Write tokens of so many answers, which end after 256 and are followed by others."""
    shared = store.fleet is not None
    transactions = number = 0
    running: list[str] = []
    began, cpu = time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - began) < seconds:
        sequence = transactions % 256
        begun: list[ResponseRecord] = []
        if not sequence:
            running = [f"resp_{name}_{number + index:026d}" for index in range(answers)]
            begun = [ResponseRecord(one, "key", time.time(), None, b'{"input":"?"}') for one in running]
            number += answers
        data = event(sequence)
        events: list[StoredEvent] = [(one, sequence, "response.output_text.delta", data) for one in running]
        ended = [(one, 256 * len(data)) for one in running] if sequence == 255 else []
        lost = store.write(LogBatch(begun, events, ended, epochs=dict.fromkeys(running, 1) if shared else {}))
        assert not lost
        transactions += 1
    return Cost(transactions * answers, transactions, spent, time.process_time() - cpu)


def write(url: str, answers: int, seconds: float, told: multiprocessing.queues.Queue[Cost]) -> None:
    """A writer in a process of its own."""
    with closing(Postgres(url)) as postgres:
        postgres.join("http://127.0.0.1:1")
        with closing(EventStore(postgres)) as store:
            told.put(drive(store, answers, seconds, str(os.getpid())))


def together(url: str, writers: int, answers: int, seconds: float) -> Cost:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    processes = [context.Process(target=write, args=(url, answers, seconds, told)) for _ in range(writers)]
    for process in processes:
        process.start()
    costs = [told.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    return Cost(
        sum(cost.tokens for cost in costs),
        sum(cost.transactions for cost in costs),
        max(cost.seconds for cost in costs),
        sum(cost.writer_s for cost in costs),
    )


def told(name: str, answers: int, cost: Cost, more: str = "") -> None:
    us = 1e6 * cost.writer_s / cost.tokens
    sys.stdout.write(
        f"{name:<22} {answers:>4} answers {cost.tokens / cost.seconds:>8.0f} tokens/s "
        f"{1e3 * cost.seconds / cost.transactions:>7.2f} ms a transaction {us:>7.1f} us of the writer a token{more}\n"
    )
    sys.stdout.flush()


def processor_s(pid: int) -> float:
    """Processor time of a PostgreSQL, with its processes that are there."""
    found = psutil.Process(pid)
    times = [each.cpu_times() for each in (found, *found.children())]
    return sum(each.user + each.system for each in times) + found.cpu_times().children_user


@contextmanager
def own(folder: Path | Home | None) -> Iterator[EventStore]:
    with closing(EventStore(folder)) as store:
        yield store


def shared(server: RealPostgres, writers: int, answers: int, seconds: float) -> None:
    url = server.new_database()
    with psycopg.connect(url, autocommit=True) as asking:

        def state() -> tuple[int, int]:
            row = asking.execute(
                "SELECT (pg_current_wal_lsn() - '0/0')::bigint, coalesce(pg_total_relation_size(to_regclass("
                "'paceline.events')), 0)"
            ).fetchone()
            assert row is not None
            return row[0], row[1]

        log, rows = state()
        before = processor_s(server.pid), psutil.Process(server.pid).cpu_times().children_system
        cost = together(url, writers, answers, seconds)
        after = processor_s(server.pid), psutil.Process(server.pid).cpu_times().children_system
        wal, size = state()
    spent = sum(after) - sum(before)
    more = (
        f" {1e6 * spent / cost.tokens:>6.1f} of PostgreSQL {(size - rows) / cost.tokens:>5.0f} B of table "
        f"{(wal - log) / cost.tokens:>5.0f} B of WAL"
    )
    told(f"PostgreSQL, {writers} writers", answers, cost, more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    seconds = parser.parse_args().seconds
    from tests.postgres import real_postgres  # of a checkout

    with tempfile.TemporaryDirectory() as folder, real_postgres(durable=True) as server:
        for answers in ANSWERS:
            with own(None) as store:
                told("memory", answers, drive(store, answers, seconds / 2))
            with own(Path(folder) / str(answers)) as store:
                told("SQLite", answers, drive(store, answers, seconds / 2))
            shared(server, 1, answers, seconds)
        for writers in WRITERS[1:]:
            shared(server, writers, SHARED, seconds)


if __name__ == "__main__":
    main()
