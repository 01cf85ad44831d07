"""Look-up tables on disk: owners, the common base, erasure, seals, and one file used by two processes."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.lookup_table import LookupTable
from paceline.engine.loader import load_model
from paceline.errors import ConfigError
from paceline.runtime import lookup_tables
from paceline.runtime.lookup_tables import (
    TableStore,
    mark_erased,
    read_dialogues,
    read_table,
    replace_table,
    table_files,
    warm,
    write_table,
)
from paceline.runtime.node import Node
from paceline.runtime.resources import Kept, NodeParts
from paceline.sealing import PLAIN, Seal, StoreSeal

pytestmark = pytest.mark.anyio

VOCAB = 300
SUCCESSORS = ([51, 62], [0.5, 0.25])


def store(folder: Path | None, vocabulary: str = "words", seal: Seal = PLAIN) -> TableStore:
    return TableStore(folder, vocabulary, VOCAB, seal=seal)


def test_a_saved_table_is_loaded_for_the_same_owner_and_vocabulary_only(tmp_path: Path) -> None:
    tables = store(tmp_path)
    tables.table("anna").record(2, *SUCCESSORS)
    tables.base.record(1, *SUCCESSORS)
    assert tables.table("ben").successors(1) == SUCCESSORS and tables.table("ben").successors(2) == ([], [])
    assert store(tmp_path).table("ben").successors(1) == ([], []), "nothing is kept before it is saved"
    assert tables.save() == 1 and tables.save_base()
    again = store(tmp_path)
    assert again.table("anna").successors(2) == SUCCESSORS == again.table("ben").successors(1)
    assert again.table("ben").successors(2) == ([], [])
    assert store(tmp_path, "other words").table("anna").successors(2) == ([], [])
    assert [(each.kind, each.owner, each.rows) for each in table_files(tmp_path)] == [
        ("base", "", 1),
        ("owner", "anna", 1),
    ]
    assert all(stat.S_IMODE(each.path.stat().st_mode) == 0o600 for each in table_files(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2, "nothing half-written is left"


async def test_a_table_that_is_asked_for_while_it_is_erased_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = store(tmp_path)
    tables.table("anna").record(2, *SUCCESSORS)
    tables.save()
    again, asked, remove = store(tmp_path), threading.Event(), lookup_tables.remove_table
    monkeypatch.setattr(lookup_tables, "remove_table", lambda path: asked.wait() and remove(path))
    erasing = asyncio.create_task(again.erase("anna"))
    await asyncio.sleep(0)
    in_use = again.table("anna")
    asked.set()
    assert await erasing
    assert not len(in_use) and again.save() == 0 and not table_files(tmp_path)
    assert again.table("anna").successors(2) == ([], [])


def test_another_models_table_of_the_owner_is_erased_too_whatever_that_holds_in_memory(tmp_path: Path) -> None:
    """As of a model that has been unloaded, or is leaving and writes what it has."""
    tables, others = store(tmp_path), store(tmp_path, "other words")
    others.table("anna").record(2, *SUCCESSORS)
    others.table("ben").record(2, *SUCCESSORS)
    assert others.save() == 2
    asyncio.run(tables.erase("anna"))
    assert {each.owner for each in table_files(tmp_path)} == {"ben"}
    assert others.save() == 1 and {each.owner for each in table_files(tmp_path)} == {"ben"}


def test_erasing_removes_memory_and_file_and_a_table_in_use_is_never_saved(tmp_path: Path) -> None:
    tables = store(tmp_path)
    used = tables.table("anna")
    used.record(2, *SUCCESSORS)
    tables.save()
    assert asyncio.run(tables.erase("anna")) and not asyncio.run(tables.erase("nobody"))
    assert used.successors(2) == ([], []) and not table_files(tmp_path)
    used.record(3, *SUCCESSORS)  # an answer that is still under way
    tables.save()
    assert not table_files(tmp_path)
    assert tables.table("anna").successors(3) == ([], [])


def test_a_copy_of_a_table_erased_meanwhile_is_not_written(tmp_path: Path) -> None:
    tables = store(tmp_path)
    tables.table("anna").record(2, *SUCCESSORS)
    write = tables.writing("anna")
    asyncio.run(tables.erase("anna"))
    assert write is not None and not write()
    assert not list(tmp_path.glob("*owner-*"))


@pytest.mark.parametrize("owner", ["anna", None])
def test_a_running_program_forgets_whom_another_erased_though_there_was_no_file_yet(
    tmp_path: Path, owner: str | None
) -> None:
    tables = store(tmp_path)
    tables.table("ben").record(3, *SUCCESSORS)
    tables.save()
    tables.table("anna").record(2, *SUCCESSORS)
    mark_erased(tmp_path, owner)
    if owner is None:
        table_files(tmp_path)[0].path.unlink()
    assert tables.save() == (1 if owner else 0)
    assert "anna" not in {each.owner for each in table_files(tmp_path)}
    assert tables.table("anna").successors(2) == ([], [])
    tables.table("anna").record(2, *SUCCESSORS)
    assert tables.save() >= 1, "what is learnt afterwards is kept"
    assert tables.table("ben").successors(3) == (SUCCESSORS if owner else ([], []))


async def test_the_number_of_owners_in_memory_is_bounded_and_the_rest_are_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_tables, "OWNERS", 2)
    tables = store(tmp_path)
    for name in ("anna", "ben", "cleo"):
        tables.table(name).record(2, *SUCCESSORS)
    assert tables.full and not table_files(tmp_path), "a request for a table does not wait for the disk"
    await tables.shrink()
    assert not tables.full and [each.owner for each in table_files(tmp_path)] == ["anna"]
    assert tables.table("anna").successors(2) == SUCCESSORS
    await tables.shrink()
    assert {each.owner for each in table_files(tmp_path)} == {"anna", "ben"}


async def test_a_table_erased_while_it_is_written_to_its_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_tables, "OWNERS", 1)
    tables = store(tmp_path)
    for name in ("anna", "ben"):
        tables.table(name).record(2, *SUCCESSORS)
    going = asyncio.create_task(tables.shrink())
    await asyncio.sleep(0)
    assert await tables.erase("anna")
    await going
    assert not tables.full and tables.table("anna").successors(2) == ([], [])
    assert "anna" not in {each.owner for each in table_files(tmp_path)}


def test_memory_is_bounded_by_owners_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_tables, "OWNERS", 3)
    monkeypatch.setattr(lookup_tables, "OWNER_ROWS", 10)
    tables = store(None)
    for owner in range(20):
        for token in range(VOCAB):
            tables.table(str(owner)).record(token, *SUCCESSORS)
    assert len(tables.table("19")) == 10
    assert tables.save() == 0 and not tables.save_base()
    assert asyncio.run(tables.erase("19")) and not asyncio.run(tables.erase("0"))


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "foreign", "wrong"])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    tables = store(tmp_path)
    tables.table("anna").record(2, *SUCCESSORS)
    tables.table("ben").record(3, *SUCCESSORS)
    tables.save()
    anna, ben = sorted(table_files(tmp_path), key=lambda each: each.owner)
    content = anna.path.read_bytes()
    damaged = {
        "cut": content[:-9],
        "garbage": b"\xff" * 200,
        "empty": b"",
        "foreign": ben.path.read_bytes(),
        "wrong": content.replace(np.array([2], "<i4").tobytes(), np.array([VOCAB], "<i4").tobytes()),
    }
    anna.path.write_bytes(damaged[damage])
    again = store(tmp_path)
    assert again.table("anna").successors(2) == ([], []) == again.table("anna").successors(3)
    assert again.table("ben").successors(3) == SUCCESSORS
    again.table("anna").record(4, *SUCCESSORS)
    again.save()
    assert store(tmp_path).table("anna").successors(4) == SUCCESSORS


def test_an_unusable_folder_only_prevents_saving(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tables = store(tmp_path / "file" / "tables")
    tables.table("anna").record(2, *SUCCESSORS)
    assert tables.save() == 0 and not tables.save_base()
    assert tables.table("anna").successors(2) == SUCCESSORS


def test_warm_up_records_the_models_distributions(tmp_path: Path) -> None:
    model = load_model("fake")
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hello there, hello"}]}) + "\n\n")
    tables = TableStore(tmp_path, model.tokenizer.fingerprint, model.tokenizer.vocab_size)
    tokens = warm(model, tables.base, read_dialogues(file), answer_tokens=3)
    prompt = tuple(model.tokenizer.chat(next(iter(read_dialogues(file)))))
    assert len(prompt) < tokens <= len(prompt) + 3
    dists = model.engine.forward(Batch((Segment(SeqId(1), 0, prompt, logits="all"),))).dists[0]
    last = {token: dist for token, dist in zip(prompt, dists, strict=True)}
    unsaid = [token for token in last if token not in {dists[-1].argmax()}]
    assert any(tables.base.successors(token)[0] == [i for i, _ in last[token].top(8)] for token in unsaid)
    assert model.engine.length(SeqId(1 << 40)) == 0


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"turns": ["hi", "ho"]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    ],
)
def test_dialogues_are_read_in_three_formats_gzip_or_not(tmp_path: Path, line: dict[str, object]) -> None:
    plain, packed = tmp_path / "talk.jsonl", tmp_path / "talk.jsonl.gz"
    plain.write_text(json.dumps(line))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    (dialogue,) = read_dialogues(plain)
    assert [message["content"] for message in dialogue] == ["hi", "ho"]
    assert [dialogue] == list(read_dialogues(packed))


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"messages": []}', '{"messages": [1]}', '{"turns": [3]}', '{"conversations": [{"from": "x"}]}']
)
def test_an_invalid_dialogue_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text(f'{{"turns": ["hi"]}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_dialogues(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_dialogues(tmp_path / "nothing.jsonl"))


@pytest.fixture
def a_hasty_interpreter() -> Iterator[None]:
    """Threads take turns as often as can be."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


async def test_an_erasure_goes_on_when_nobody_waits_for_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = store(tmp_path)
    tables.table("anna").record(2, *SUCCESSORS)
    tables.save()
    gone, remove = threading.Event(), lookup_tables.remove_table
    monkeypatch.setattr(lookup_tables, "remove_table", lambda path: gone.wait() and remove(path))
    erasing = asyncio.create_task(tables.erase("anna"))
    await asyncio.sleep(0)
    erasing.cancel()
    await asyncio.wait({erasing})
    assert not len(tables.table("anna"))
    gone.set()
    while table_files(tmp_path):
        await asyncio.sleep(0.001)


@pytest.mark.usefixtures("a_hasty_interpreter")
async def test_answers_begin_while_their_owner_erases(tmp_path: Path) -> None:
    tables = store(tmp_path)

    async def erase() -> None:
        while True:
            await tables.erase("anna")

    erasing = asyncio.create_task(erase())
    for _ in range(200):
        tables.table("anna").record(2, *SUCCESSORS)
        if (write := tables.writing("anna")) is not None:
            await asyncio.to_thread(write)
    erasing.cancel()
    await asyncio.wait({erasing})
    await tables.erase("anna")
    assert not table_files(tmp_path) and tables.save() == 0


async def test_an_answer_learns_on_while_its_owner_erases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, learning, erased = load_model("fake"), threading.Event(), threading.Event()
    tables = TableStore(tmp_path, model.tokenizer.fingerprint, model.tokenizer.vocab_size)
    slot, erase = LookupTable._slot, LookupTable.erase

    def waits_for_erasure(table: LookupTable, token: int) -> int:
        found = slot(table, token)
        learning.set()
        erased.wait(0.2)  # over by then, unless it waits for the one who writes
        return found

    def waits_for_writer(table: LookupTable) -> None:
        learning.wait(0.2)  # likewise
        erase(table)
        erased.set()

    async with asyncio.timeout(30), Node("cloud", model, None, NodeParts(kept=Kept(tables=tables))) as node:
        used = tables.table("anna")
        monkeypatch.setattr(LookupTable, "_slot", waits_for_erasure)
        monkeypatch.setattr(LookupTable, "erase", waits_for_writer)
        forgetting = asyncio.create_task(node.forget_answers("anna"))
        await asyncio.sleep(0)
        used.record(2, *SUCCESSORS)
        await forgetting
        monkeypatch.undo()
        assert not used._version & 1, "who reads its rows would wait for ever"
        used.record(2, *SUCCESSORS)
        assert used.successors(2) == SUCCESSORS
    assert not table_files(tmp_path)


async def test_a_table_can_be_used_while_it_is_written_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_tables, "OWNERS", 2)
    tables = store(tmp_path)
    used = {name: tables.table(name) for name in ("anna", "ben", "cleo")}
    for table in used.values():
        table.record(2, *SUCCESSORS)
    going = asyncio.create_task(tables.shrink())
    await asyncio.sleep(0)  # anna's table is being written
    assert tables.table("anna") is used["anna"]
    used["anna"].record(3, *SUCCESSORS)
    await going
    assert tables.table("anna") is used["anna"], "asked for again, it stays, and another goes"
    assert tables.table("ben") is not used["ben"] and tables.table("ben").successors(2) == SUCCESSORS
    assert tables.save() == 3
    assert store(tmp_path).table("anna").successors(3) == SUCCESSORS


# ---- sealed tables, what is left of former files, and one file used by two processes --------------------------------
SEAL = StoreSeal.new(bytes(32))
REPLACED = 30  # times, while it is read


def taught(folder: Path, seal: Seal, token: int = 2) -> TableStore:
    tables = store(folder, seal=seal)
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
    assert store(tmp_path, seal=SEAL).table("anna").successors(2) == SUCCESSORS
    assert [(each.owner, each.rows, each.kind) for each in table_files(tmp_path)] == [("anna", 1, "owner")]
    assert not caplog.records
    for other in (PLAIN, StoreSeal.new(bytes(32))):
        assert store(tmp_path, seal=other).table("anna").successors(2) == ([], [])
    assert len(caplog.records) == 2


def test_a_sealed_file_under_another_owners_name_is_refused(tmp_path: Path) -> None:
    taught(tmp_path, SEAL)
    taken = the_file(tmp_path)
    other = store(tmp_path, seal=SEAL)._path("owner", "ben")
    taken.rename(other)
    assert store(tmp_path, seal=SEAL).table("ben").successors(2) == ([], [])


def test_plain_tables_are_sealed_at_the_next_start_and_their_rows_overwritten(tmp_path: Path) -> None:
    taught(tmp_path, PLAIN)
    opened = read_table(the_file(tmp_path))
    assert opened is not None and opened[1]["ids"].tobytes() in the_file(tmp_path).read_bytes()
    former = tmp_path / "former"
    os.link(the_file(tmp_path), former)
    tables = store(tmp_path, seal=SEAL)
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


def test_a_file_that_is_replaced_twice_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the third might have the inode of the first, and be taken for it."""
    taught(tmp_path, SEAL).save()
    path, read = the_file(tmp_path), lookup_tables._read
    content, times = path.read_bytes(), 0

    def overwritten(path: Path, seal: Seal) -> object:
        nonlocal times
        times += 1
        if times > 1:
            return read(path, seal)
        for _ in range(2):
            assert write_table(path, content, replace_table)
        raise ValueError("its header is empty")

    monkeypatch.setattr(lookup_tables, "_read", overwritten)
    assert read_table(path, SEAL) is not None and times == 2


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
