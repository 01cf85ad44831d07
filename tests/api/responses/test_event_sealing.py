"""Stored responses on the disk: encrypted, each under a key of its own that goes with it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.api.responses.store import FILE, EventRow, EventStore, LogBatch, ResponseRecord
from paceline.errors import ConfigError
from paceline.sealing import MARK, PLAIN, Box, DamagedError, Seal, StoreSeal, answers_key, open_answers_seal

SEAL = StoreSeal.new(bytes(32))
ASKED = b'{"input":"where does the blue boat moor"}'
SAID = b'{"response":{"output":[{"text":"it moors at berth nine"}],"usage":{}},"type":"response.completed"}'
PHRASES = (b"blue boat", b"berth nine")


def written(store: EventStore, response: str) -> None:
    rows = [(response, 0, "delta", b'"berth nine"'), (response, 1, "response.completed", SAID)]
    store.write(LogBatch([ResponseRecord(response, "anna", 1.0, None, ASKED)], rows, [(response, 200)]))


def a_log(folder: Path, seal: Seal, *responses: str) -> None:
    with closing(EventStore(folder, seal)) as store:
        for response in responses:
            written(store, response)


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def is_whole(store: EventStore, response: str) -> bool:
    found = store.find(response)
    assert found is not None and found.request == ASKED
    assert store.last(response) == EventRow(1, "response.completed", SAID)
    assert store.output(response) == ("response.completed", '[{"text":"it moors at berth nine"}]')
    return store.read(response, -1, 10) == [EventRow(0, "delta", b'"berth nine"'), store.last(response)]


def sql(folder: Path, statement: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        return connection.execute(statement, values).fetchall()


@pytest.mark.parametrize("seal", [PLAIN, SEAL], ids=["plain", "sealed"])
def test_the_disk_holds_no_word_of_a_sealed_response_while_it_is_written_or_after(tmp_path: Path, seal: Seal) -> None:
    with closing(EventStore(tmp_path, seal)) as store:
        written(store, "a")
        shown = [phrase in on_disk(tmp_path) for phrase in PHRASES]
        assert is_whole(store, "a")
    assert shown == [phrase in on_disk(tmp_path) for phrase in PHRASES] == [not seal.is_on] * 2
    with closing(EventStore(tmp_path, seal)) as store:
        assert is_whole(store, "a")


def test_a_log_in_plain_text_is_encrypted_when_it_is_opened(tmp_path: Path) -> None:
    a_log(tmp_path, PLAIN, "a", "b")
    assert PHRASES[0] in on_disk(tmp_path)
    with closing(EventStore(tmp_path, SEAL)) as store:
        assert [phrase in on_disk(tmp_path) for phrase in PHRASES] == [False, False]
        written(store, "c")
        assert all(is_whole(store, each) for each in "abc")


def test_encryption_that_is_broken_off_leaves_every_response_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_log(tmp_path, PLAIN, "a", "b")
    make_key = StoreSeal.make_key

    def second_fails(self: StoreSeal, owner: str) -> tuple[bytes, Box]:
        if owner == "b":
            raise OSError("no room")
        return make_key(self, owner)

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="no room"):
        patch.setattr(StoreSeal, "make_key", second_fails)
        EventStore(tmp_path, SEAL)
    with closing(EventStore(tmp_path, PLAIN)) as store:
        assert is_whole(store, "a") and is_whole(store, "b")


def test_deleting_a_response_destroys_its_key_and_no_other(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path, SEAL)) as store:
        written(store, "a")
        written(store, "b")
        keys = dict(sql(tmp_path, "SELECT response, key FROM response_keys"))
        store.delete("a")
        assert [key in on_disk(tmp_path) for key in (keys["a"], keys["b"])] == [False, True]
        assert store.find("a") is None and store.read("a", -1, 10) == [] and is_whole(store, "b")


@pytest.mark.parametrize("column", ["events.data", "responses.request", "response_keys.key"])
def test_a_changed_bit_is_told_and_concerns_its_response_only(tmp_path: Path, column: str) -> None:
    a_log(tmp_path, SEAL, "a", "b")
    table, _, name = column.partition(".")
    key = "id" if table == "responses" else "response"
    [(value,)] = sql(tmp_path, f"SELECT {name} FROM {table} WHERE {key} = 'a' LIMIT 1")
    for bit in range(0, 8 * len(value), 31):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        sql(tmp_path, f"UPDATE {table} SET {name} = ? WHERE {key} = 'a'", bytes(damaged))
        with closing(EventStore(tmp_path, SEAL)) as store:
            with pytest.raises(DamagedError):
                (store.find if table == "responses" else store.last)("a")
            assert is_whole(store, "b")


def test_rows_cannot_be_exchanged(tmp_path: Path) -> None:
    a_log(tmp_path, SEAL, "a", "b")
    [(first,), (last,)] = sql(tmp_path, "SELECT data FROM events WHERE response = 'a' ORDER BY sequence")
    for response, data in (("a", first), ("b", last)):  # an earlier event, another response's
        sql(tmp_path, "UPDATE events SET data = ? WHERE response = ? AND sequence = 1", data, response)
    with closing(EventStore(tmp_path, SEAL)) as store:
        for response in "ab":
            with pytest.raises(DamagedError):
                store.last(response)


# ---- the seal of a folder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", [True, False])
def test_without_the_seal_no_other_is_made_beside_what_it_sealed(tmp_path: Path, encrypt: bool) -> None:
    seal, mark = open_answers_seal(tmp_path, encrypt=True), tmp_path / MARK
    a_log(tmp_path, seal, "a")
    content = mark.read_bytes()
    mark.unlink()
    with pytest.raises(ConfigError, match=r"answers\.seal, which says how, is gone: put it back, or remove"):
        open_answers_seal(tmp_path, encrypt=encrypt)
    assert not mark.exists()
    mark.write_bytes(content)
    mark.chmod(0o600)
    with closing(EventStore(tmp_path, open_answers_seal(tmp_path, encrypt=encrypt))) as store:
        assert is_whole(store, "a")


def test_without_the_key_nothing_is_made_anew_and_a_sentence_says_what_to_do(tmp_path: Path) -> None:
    open_answers_seal(tmp_path, encrypt=True)
    key = answers_key(tmp_path).path
    content = key.read_bytes()
    key.unlink()
    for encrypt in (True, False):
        with pytest.raises(ConfigError, match=r"answers\.key, which held their key, is gone: put it back"):
            open_answers_seal(tmp_path, encrypt=encrypt)
    assert [each.name for each in tmp_path.iterdir()] == [MARK]
    other = tmp_path / "other"
    open_answers_seal(other, encrypt=True)
    key.write_bytes(answers_key(other).path.read_bytes())
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="another key"):
        open_answers_seal(tmp_path, encrypt=True)
    key.write_bytes(content)
    assert open_answers_seal(tmp_path, encrypt=True).is_on


def test_what_another_process_has_open_is_not_encrypted_under_it(tmp_path: Path) -> None:
    a_log(tmp_path, PLAIN, "a")
    with closing(EventStore(tmp_path, PLAIN)) as first:
        first.allow_others()
        with closing(EventStore(tmp_path, SEAL)) as second:
            written(second, "b")
            assert is_whole(second, "a") and is_whole(second, "b") and is_whole(first, "a")
            with pytest.raises(ConfigError, match="start this one again"):
                first.read("b", -1, 10)
    with closing(EventStore(tmp_path, SEAL)) as store:
        assert is_whole(store, "a") and PHRASES[0] not in on_disk(tmp_path)


def test_a_damaged_response_that_was_cut_does_not_keep_the_log_from_opening(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path, SEAL)) as store:
        store.write(LogBatch([ResponseRecord("a", "anna", 1.0, None, ASKED)], [("a", 0, "delta", b"1")], []))
        written(store, "b")
    sql(tmp_path, "UPDATE events SET data = x'00' WHERE response = 'a'")
    with closing(EventStore(tmp_path, SEAL)) as store:
        assert store.repair(lambda rows: rows, lambda _: False) == 1
        assert store.unfinished() == [] and is_whole(store, "b")


def test_a_folder_keeps_the_seal_of_the_first_program_that_encrypts(tmp_path: Path) -> None:
    assert open_answers_seal(tmp_path, encrypt=False) is PLAIN and not list(tmp_path.iterdir())
    first = open_answers_seal(tmp_path, encrypt=True)
    assert first.is_on and [oct(each.stat().st_mode)[-3:] for each in tmp_path.iterdir()] == ["600", "600"]
    for encrypt in (True, False):
        assert open_answers_seal(tmp_path, encrypt=encrypt).name == first.name
