"""`paceline database copy`: what a state directory has is in the database, and the directory stays as it was."""

from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.api.http.auth import Keyring
from paceline.api.responses.store import EventRow, EventStore, LogBatch, ResponseRecord, Turn
from paceline.commands.main import build
from paceline.errors import ConfigError
from paceline.postgres import Postgres
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.sealing import open_answers_seal
from server.database import copy, look
from server.devices import Registry
from server.keys import Keys
from server.program import common_key, server_key

EVENTS = [EventRow(number, "response.output_text.delta", b"%d" % number) for number in range(3000)]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def filled(folder: Path, *, sealed: bool) -> str:
    """A key that holds in this state directory."""
    server_key(folder)
    key = Keys(folder).create("notebook", scopes=["chat"])
    Keys(folder).create("old")
    Keys(folder).revoke("old")
    Registry(folder).add("phone")
    with closing(EventStore(folder, open_answers_seal(folder, encrypt=sealed))) as store:
        store.conversations.create(ResponseRecord("conv_1", "key", 1.0, None, b'{"a":1}'), [b"asked"])
        begun = ResponseRecord("resp_1", "key", 2.0, "resp_0", b'{"input":"?"}')
        turn = {"resp_1": Turn("conv_1", (b"said",))}
        store.write(LogBatch([begun], [("resp_1", *event) for event in EVENTS], [("resp_1", 9000)], turn))
    return key


def test_documents_and_files_move_too(url: str, tmp_path: Path) -> None:
    folder, embedder = tmp_path / "state", HashEmbedder()
    filled(folder, sealed=False)
    content = bytes(range(256)) * 5000  # more than one part
    with DocumentStore.open(folder / "docs", embedder, side="cloud") as store:
        store.add_text("boat.txt", "The red boat lies in the harbour.", zone="cloud")
        store.add_text("gone.txt", "The green boat has sunk.", zone="cloud")
        store.remove("gone.txt")
        with closing(Library(store, "cloud")) as library:
            file = library.uploads.add("key", "image.bin", "user_data", io.BytesIO(content))
            made = library.stores.create("key", "shelf", {}, [])
        expected = store.search("red boat", 3)
    copied = CliRunner().invoke(build(), ["database", "copy", "--to", url, "--state-dir", str(folder)])
    assert copied.exit_code == 0, copied.output
    with closing(Postgres(url)) as postgres:
        postgres.join("http://a")
        with DocumentStore.open(tmp_path / "other", embedder, side="cloud", home=postgres) as store:
            found = store.search("red boat", 3)
            assert [(each.chunk_id, each.text) for each in found] == [(each.chunk_id, each.text) for each in expected]
            with closing(Library(store, "cloud")) as library:
                with library.uploads.open(file.id) as opened:
                    assert opened.read() == content
                assert library.stores.get("key", made.id) == made
            store.add_text("new.txt", "The blue boat is new.", zone="cloud")  # with an id of its own
            assert store.search("blue boat", 1)[0].chunk_id > expected[0].chunk_id


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
def test_a_state_directory_moves_into_a_database(url: str, tmp_path: Path, sealed: bool) -> None:
    folder = tmp_path / "state"
    key = filled(folder, sealed=sealed)
    before = contents(folder)
    done = CliRunner().invoke(build(), ["database", "copy", "--to", url, "--state-dir", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    copied = json.loads(done.stdout)["copied"]
    assert copied | {"response_keys": 0} == {
        "keys": 2, "identities": 0, "enrolment_codes": 1, "responses": 2, "events": 3002, "response_keys": 0,
    }  # fmt: skip
    assert contents(folder) == before
    with closing(Postgres(url)) as postgres:
        postgres.join("http://a")
        assert common_key(tmp_path / "other", postgres).seed == server_key(folder).seed
        with Keys(postgres).current() as stored:
            assert Keyring({}, stored).identify(f"Bearer {key}") is not None
        assert [(each.name, each.state) for each in Keys(postgres).all()] == [("notebook", "valid"), ("old", "revoked")]
        assert [device.name for device in Registry(postgres).devices()] == ["phone"]
        with closing(EventStore(postgres)) as store:
            record = store.find("resp_1")
            assert record == ResponseRecord("resp_1", "key", 2.0, "resp_0", b'{"input":"?"}')
            assert store.read("resp_1", -1, -1) == EVENTS and store.take_over(list) == []
            assert [row.data for row in store.read("conv_1", -1, -1)] == [b"asked", b"said"]
        with pytest.raises(ConfigError, match="rows in keys already"):
            copy(folder, postgres)


def test_what_would_be_half_a_copy_is_refused(url: str, tmp_path: Path) -> None:
    filled(tmp_path / "used", sealed=False)
    with closing(Postgres(url)) as postgres:
        with closing(EventStore(tmp_path / "used")), pytest.raises(ConfigError, match="stop it first"):
            copy(tmp_path / "used", postgres)
        with pytest.raises(ConfigError, match=r"no state directory.*`paceline serve` on it once"):
            copy(tmp_path, postgres)
        filled(tmp_path / "sealed", sealed=False)
        DocumentStore.open(tmp_path / "sealed" / "docs", HashEmbedder(), side="cloud", encrypt=True).close()
        with pytest.raises(ConfigError, match="are encrypted"):
            copy(tmp_path / "sealed", postgres)
        common_key(tmp_path / "other", postgres)
        with pytest.raises(ConfigError, match="another server's key"):
            copy(tmp_path / "used", postgres)
        assert Keys(postgres).all() == []
        postgres.join("http://a")
        status, text = look(url)
        assert status == "ok" and "pgvector" in text and "1 server alive" in text, text
    assert look("postgresql://paceline:hunter2@127.0.0.1:1/paceline")[0] == "fail"
    with pytest.raises(ConfigError, match=r"cannot be used: check --database\. It says: .*") as refused:
        Postgres("postgresql://paceline:hunter2@127.0.0.1:1/paceline")
    assert str(refused.value).isprintable() and "hunter2" not in str(refused.value)
