"""Errors as clients see them."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from paceline.api.http.errors import failure_of
from paceline.errors import StorageError
from paceline.sql import SqliteFile, connect


def test_a_full_disk_is_507_and_no_path_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "documents.sqlite"
    connection = connect(file)
    connection.execute("CREATE TABLE texts (text)")
    connection.execute("PRAGMA max_page_count = 3")  # as a full disk is to SQLite
    with pytest.raises(StorageError) as raised, SqliteFile(file, "a document store").explained():
        connection.execute("INSERT INTO texts VALUES (?)", ("x" * 100_000,))
    connection.close()
    failure = failure_of(raised.value)
    assert (failure.status, failure.code) == (507, "disk_full")
    assert str(tmp_path) not in failure.message and str(file) in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("can't start new thread"), 503),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 503),  # as a fork fails
        (MemoryError(), 503),
        (RuntimeError("generator raised StopIteration"), 500),
    ],
)
def test_what_the_machine_does_not_give_now_is_asked_for_again_and_a_mistake_is_not(
    error: Exception, status: int
) -> None:
    failure = failure_of(error)
    assert (failure.status, "Retry-After" in failure.headers) == (status, status == 503)


def test_a_damaged_file_is_503_and_no_path_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as raised, SqliteFile(tmp_path / "x.sqlite", "a token log").explained():
        raise sqlite3.DatabaseError("file is not a database")
    failure = failure_of(raised.value)
    assert failure.status == 503 and "Retry-After" in failure.headers and str(tmp_path) not in failure.message
