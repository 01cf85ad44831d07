"""Sealed look-up tables, what is left of former files, and one file used by two processes."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.drafting.lookup_table import LookupTable
from paceline.runtime.lookup_tables import TableStore, read_table, table_files
from paceline.sealing import PLAIN, Seal, StoreSeal

VOCAB = 300
SEAL = StoreSeal.new(bytes(32))
SUCCESSORS = ([51, 62], [0.5, 0.25])
REPLACED = 30  # times, while it is read


def store(folder: Path, seal: Seal) -> TableStore:
    return TableStore(folder, "words", VOCAB, seal=seal)


def taught(folder: Path, seal: Seal, token: int = 2) -> TableStore:
    tables = store(folder, seal)
    tables.table("anna").record(token, *SUCCESSORS)
    assert tables.save() == 1
    return tables


def the_file(folder: Path) -> Path:
    (found,) = folder.glob("owner-*")
    return found


def test_a_sealed_table_is_read_with_its_seal_only_and_says_nothing_of_its_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taught(tmp_path, SEAL)
    opened = read_table(the_file(tmp_path), SEAL)
    assert opened is not None
    assert opened[1]["ids"].tobytes() not in the_file(tmp_path).read_bytes()
    assert store(tmp_path, SEAL).table("anna").successors(2) == SUCCESSORS
    assert [(each.owner, each.rows, each.kind) for each in table_files(tmp_path)] == [("anna", 1, "owner")]
    assert not caplog.records
    for other in (PLAIN, StoreSeal.new(bytes(32))):
        assert store(tmp_path, other).table("anna").successors(2) == ([], [])
    assert len(caplog.records) == 2


def test_a_sealed_file_under_another_owners_name_is_refused(tmp_path: Path) -> None:
    taught(tmp_path, SEAL)
    taken = the_file(tmp_path)
    other = store(tmp_path, SEAL)._path("owner", "ben")
    taken.rename(other)
    assert store(tmp_path, SEAL).table("ben").successors(2) == ([], [])


def test_plain_tables_are_sealed_at_the_next_start_and_their_rows_overwritten(tmp_path: Path) -> None:
    taught(tmp_path, PLAIN)
    opened = read_table(the_file(tmp_path))
    assert opened is not None and opened[1]["ids"].tobytes() in the_file(tmp_path).read_bytes()
    former = tmp_path / "former"
    os.link(the_file(tmp_path), former)
    tables = store(tmp_path, SEAL)
    assert former.read_bytes().strip(b"\0") == b""
    assert opened[1]["ids"].tobytes() not in the_file(tmp_path).read_bytes()
    assert tables.table("anna").successors(2) == SUCCESSORS


def test_the_key_of_a_file_is_overwritten_when_it_is_replaced_or_erased(tmp_path: Path) -> None:
    tables = taught(tmp_path, SEAL)
    formers = []
    for number, end in enumerate((tables.save, lambda: asyncio.run(tables.erase("anna")))):
        former = tmp_path / f"former-{number}"
        os.link(the_file(tmp_path), former)
        assert b'"key"' in former.read_bytes()
        assert end()
        formers.append(former.read_bytes())
    for content in formers:
        assert b'"key"' not in content and content[:300].strip(b"\0") == b"", "the header, which holds the key"
    assert not list(tmp_path.glob("owner-*"))


@pytest.mark.parametrize("seal", [PLAIN, SEAL], ids=["plain", "sealed"])
def test_a_process_that_reads_while_another_writes_has_one_table_or_the_other(
    tmp_path: Path, seal: Seal, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader has a whole table every time, although each replacement overwrites the key of the former one."""
    path = tmp_path / "owner-x.safetensors"
    args = [sys.executable, "-c", WRITER, str(path), seal.name]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        seen = set[int]()
        with caplog.at_level(logging.WARNING):
            while len(seen) < REPLACED:
                opened = read_table(path, seal)
                assert opened is not None, "a table is always there"
                metadata, arrays = opened
                table = LookupTable(VOCAB)
                table.load(arrays)
                number = int(metadata["owner"])
                assert table.successors(number % VOCAB) == SUCCESSORS and len(table) == 1
                seen.add(number)
        writer.stdin.close()
        assert writer.wait(60) == 0
    assert not caplog.records


WRITER = """
import select, sys
from pathlib import Path
from paceline.core.drafting.lookup_table import LookupTable
from paceline.runtime.lookup_tables import encode_table, replace_table, write_table
from paceline.sealing import PLAIN, StoreSeal
path = Path(sys.argv[1])
seal = StoreSeal.of(sys.argv[2], bytes(32)) or PLAIN
number = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    table = LookupTable(300)
    table.record(number % 300, [51, 62], [0.5, 0.25])
    facts = {"format": "paceline look-up table 1", "vocabulary": "words", "kind": "owner", "owner": str(number)}
    assert write_table(path, encode_table(path.name, table.arrays(), facts, seal), replace_table)
    if not number:
        print("written", flush=True)
    number += 1
"""
