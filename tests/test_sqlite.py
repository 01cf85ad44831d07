"""SQLite files: a second connection of a process must not drop the locks of the first; file modes."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from paceline import sql
from paceline.errors import ConfigError, StorageError

OTHER_PROCESS = """
import sqlite3, sys
rows = sqlite3.connect(sys.argv[1])
rows.execute("INSERT INTO numbers VALUES (2)")
rows.commit()
rows.close()
"""


def write_from_another_process(file: Path) -> None:
    """Write and close, whereupon SQLite removes the write-ahead log if it takes itself for the last user."""
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(file)], check=True, timeout=60)


def test_a_second_connection_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "numbers.sqlite"
    with closing(sql.connect(file)) as first:
        first.execute("CREATE TABLE numbers (n INTEGER)")
        first.execute("INSERT INTO numbers VALUES (1)")
        with closing(sql.connect(file)):
            write_from_another_process(file)
            assert file.with_name("numbers.sqlite-wal").exists(), "its log was removed under a connection in use"
            first.execute("INSERT INTO numbers VALUES (3)")
        with closing(sqlite3.connect(file)) as reader:
            assert [n for (n,) in reader.execute("SELECT n FROM numbers ORDER BY n")] == [1, 2, 3]
            assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_tables_are_made_once_and_those_of_another_format_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "numbers.sqlite"
    start = threading.Barrier(4)

    def make() -> None:
        with closing(sql.connect(file)) as rows:
            start.wait()
            sql.prepare(rows, file, 1, ["CREATE TABLE numbers (n INTEGER)", "INSERT INTO numbers VALUES (1)"], "wait")

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(make) for _ in range(4)]:
            each.result()
    with closing(sql.connect(file)) as rows:
        assert rows.execute("SELECT n FROM numbers").fetchall() == [(1,)]
        for version in (0, 2, 99):
            rows.execute(f"PRAGMA user_version = {version}")
            with pytest.raises(
                ConfigError, match=rf"numbers\.sqlite .*format {version}, this one reads 1\).*or wait\."
            ):
                sql.prepare(rows, file, 1, [], "wait")


def test_threads_that_make_a_database_at_once_keep_their_locks(tmp_path: Path) -> None:
    for round_number in range(20):
        file = tmp_path / str(round_number) / "numbers.sqlite"
        start = threading.Barrier(4)

        def open_it(file: Path = file, start: threading.Barrier = start) -> sqlite3.Connection:
            start.wait()
            return sql.connect(file)

        with ThreadPoolExecutor(4) as threads:
            opened = [each.result() for each in [threads.submit(open_it) for _ in range(4)]]
        opened[0].execute("CREATE TABLE numbers (n INTEGER)")
        assert [rows.execute("SELECT count(*) FROM numbers").fetchone() for rows in opened] == [(0,)] * 4
        for rows in opened:
            rows.close()


PRIVATE = """
import os, sys
from pathlib import Path
from paceline import sql

for umask in (0o000, 0o022, 0o777):
    os.umask(umask)
    folder = Path(sys.argv[1], str(umask))
    rows = sql.connect(folder / "private.sqlite")
    rows.execute("CREATE TABLE t (x)")
    print(*sorted(f"{each.name} {each.stat().st_mode & 0o777:o}" for each in folder.iterdir()), sep=", ")
"""


def test_a_new_database_and_its_logs_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """In a process of its own, since a umask belongs to the whole process."""
    run = [sys.executable, "-c", PRIVATE, str(tmp_path)]
    shown = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown == "private.sqlite 600, private.sqlite-shm 600, private.sqlite-wal 600\n" * 3


def test_an_existing_database_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "shared.sqlite"
    sql.connect(file).close()
    file.chmod(0o640)  # its owner's choice
    sql.connect(file).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_folder_in_which_others_could_exchange_the_file_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o757)
    with pytest.raises(StorageError, match="Others may write"):
        sql.connect(tmp_path / "numbers.sqlite")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_a_fault_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As others are, which who watches a store outlives; it can be opened later."""
    place = sql.SqliteFile(tmp_path / "numbers.sqlite", "a store of numbers")

    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        with pytest.raises(StorageError, match=r"numbers\.sqlite cannot be used: .*Allow more open files"):
            place.connect()
    place.connect().close()
