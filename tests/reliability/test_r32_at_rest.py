"""R32: what lies on the disk of an encrypted store says nothing, tells damage, and is gone with its document; of what a
server has deleted nothing is left in its files, nor in any table of its database."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.demo import Children
from paceline.errors import PacelineError
from tests.e2e.pair import Server
from tests.postgres import sample, tables
from tests.rag.store.sealed import MARKS, content, filled, holding
from tests.reliability.conftest import Figure, Size
from tests.reliability.streams import until

UPLOADED = "The cellar below the quixotic inn opens with the word yggdrasil.\n"
MANAGED = "# vault-notes\n\nThe vault behind the quixotic mill opens with the word zanzibar.\n"


def test_an_agent_s_files_hold_no_mark_before_and_after_deletion(tmp_path: Path, figure: Figure) -> None:
    with Children(tmp_path) as children:
        agent = Server(children, tmp_path, "agent")
        note = tmp_path / "vault-notes.md"
        note.write_text(MANAGED)
        agent.docs("add", str(note))
        note.unlink()
        text = UPLOADED.encode() * (7_500_000 // len(UPLOADED) // 16)  # a sixteenth of 7.5 MB, which fills 1.1 s of CPU
        upload = {"files": {"file": ("cellar-notes.txt", text)}, "data": {"purpose": "assistants"}}
        file = agent.call("POST", "/v1/files", **upload).json()["id"]
        body = {"name": "winebook", "metadata": {"kind": "burgundy"}, "file_ids": [file]}
        store = agent.call("POST", "/v1/vector_stores", json=body).json()["id"]
        until(lambda: not agent.call("GET", f"/v1/vector_stores/{store}").json()["file_counts"]["in_progress"])
        found = agent.call("POST", f"/v1/vector_stores/{store}/search", json={"query": "quixotic cellar word"}).json()
        assert any("yggdrasil" in part["text"] for hit in found["data"] for part in hit["content"])
        assert agent.call("GET", f"/v1/files/{file}/content").content == text
        asked = {"model": "fake", "input": UPLOADED, "max_output_tokens": 16}
        response = agent.call("POST", "/v1/responses", json=asked).json()["id"]
        kept = agent.call("GET", f"/v1/responses/{response}/input_items").json()
        assert "yggdrasil" in kept["data"][0]["content"][0]["text"]
        before = holding(agent.state)
        figure("marks in files before deletion", len(before), at_most=0)
        assert not before
        began = time.monotonic()
        assert agent.call("DELETE", f"/v1/files/{file}").status_code == 200
        figure("deletion of 0.47 MB by request", time.monotonic() - began, at_most=2.0, unit="s")
        began = time.monotonic()
        found = agent.call("POST", f"/v1/vector_stores/{store}/search", json={"query": "quixotic cellar word"}).json()
        figure("out of search", time.monotonic() - began, at_most=1.0, unit="s")
        assert found["data"] == []
        began = time.monotonic()
        agent.docs("remove", "vault-notes.md")
        assert agent.call("DELETE", f"/v1/responses/{response}").status_code == 200
        figure("deletion by command, with the start of its program", time.monotonic() - began, unit="s")
        after = holding(agent.state)
        figure("marks in files after deletion", len(after), at_most=0)
        assert not after
    assert not holding(agent.state)
    assert not any(mark in agent.child.log.read_bytes() for mark in MARKS)


SAID = [  # a word of each text, name, path, description and attribute that a server is given
    "zanzibar", "vault-notes", "yggdrasil", "cellar-notes", "winebook", "burgundy", "merlot", "asked-quillon",
    "told-ferrol", "noted-orlop", "spoken-tamarin", "topic-sable", "item-corsair", "later-ombre", "half-tiller",
]  # fmt: skip
KEPT = {"keys", "identities"}  # lists of names, revoked ones too
COUNTED = {"meta", "servers", "sqlite_sequence", "versions"}


def told(state: Path, words: list[str]) -> dict[str, set[str]]:
    """The words that are in each table and file: as they are, in bytes, and as the tokens of the fake model."""
    found = {}
    forms = [(word, (word, word.encode().hex(), ",".join(map(str, word.encode())))) for word in words]
    for table, rows in tables(state).items():
        text = "\n".join(rows)
        text += text.replace(" ", "")
        found[table] = {word for word, each in forms if any(form in text for form in each)}
    for name, mark in holding(state, tuple(word.encode() for word in words)):
        found.setdefault(name, set()).add(mark.decode())
    return {place: words for place, words in found.items() if words}


def passages(response: dict[str, Any]) -> set[str]:
    results = [result["text"] for item in response["output"] for result in item.get("results") or ()]
    return {*results, *(citation["passage"] for citation in response["paceline"]["citations"])}


def documents(response: dict[str, Any]) -> list[str]:
    return [citation["document"] for citation in response["paceline"]["citations"]]


def own_rows(state: Path) -> set[tuple[str, str]]:
    found = {table.removeprefix("paceline."): rows for table, rows in tables(state).items() if "pg_" not in table}
    return {(table, row) for table, rows in found.items() if table not in COUNTED for row in rows}


@pytest.mark.usefixtures("kept")
def test_of_what_is_deleted_no_table_and_no_file_of_a_server_has_a_word(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        server = Server(children, tmp_path)
        key = server.make_key("notebook")

        def call(method: str, path: str, **more: Any) -> Any:
            answer = server.call(method, f"/v1/{path}", key, **more)
            assert answer.status_code == 200, answer.text
            return answer.json()

        before = own_rows(server.state)
        note = tmp_path / "vault-notes.md"
        note.write_text(MANAGED)
        server.docs("add", str(note))
        note.unlink()
        upload = {"file": ("cellar-notes.txt", UPLOADED * 40)}
        file = call("POST", "files", files=upload, data={"purpose": "assistants"})["id"]
        store = call("POST", "vector_stores", json={"name": "winebook", "metadata": {"kind": "burgundy"}})["id"]
        url = f"vector_stores/{store}"
        call("POST", f"{url}/files", json={"file_id": file, "attributes": {"grape": "merlot"}})
        while call("GET", url)["file_counts"]["in_progress"]:
            pass  # each look is a request
        assert call("POST", f"{url}/search", json={"query": "quixotic inn"})["data"]
        item = {"type": "message", "role": "user", "content": "item-corsair"}
        talk = call("POST", "conversations", json={"items": [item], "metadata": {"topic": "topic-sable"}})["id"]
        (item,) = call("GET", f"conversations/{talk}/items")["data"]
        call("DELETE", f"conversations/{talk}/items/{item['id']}")
        asked = {
            "model": "fake",
            "instructions": "spoken-tamarin",
            "input": "Which word opens the quixotic vault, and which the cellar? asked-quillon",
            "metadata": {"note": "noted-orlop"},
            "tools": [{"type": "file_search", "vector_store_ids": ["default", store]}],
            "include": ["file_search_call.results", "message.output_text.logprobs"],
            "max_output_tokens": 16,
            "paceline": {"report": True, "documents": 4},
        }
        responses = [call("POST", "responses", json=asked)["id"]]
        responses += [call("POST", "responses", json=asked | {"conversation": talk, "input": "told-ferrol"})["id"]]
        later = asked | {"background": True, "input": "later-ombre", "previous_response_id": responses[0]}
        responses += [call("POST", "responses", json=later)["id"]]
        until(lambda: call("GET", f"responses/{responses[-1]}")["status"] in ("completed", "incomplete"))
        half = asked | {"background": True, "input": "half-tiller", "max_output_tokens": 4000}
        cut = call("POST", "responses", json=half)["id"]
        call("POST", f"responses/{cut}/cancel")
        sample(server.state)  # as the database does by itself
        words = told(server.state, SAID)
        assert set().union(*words.values()) == {*SAID} - {"item-corsair"}, words

        whole = call("GET", f"responses/{responses[0]}")
        assert all(word in " ".join(passages(whole)) for word in ("zanzibar", "yggdrasil"))
        server.docs("remove", "vault-notes.md")
        call("DELETE", f"{url}/files/{file}")
        call("DELETE", url)
        call("DELETE", f"files/{file}")
        left = call("GET", f"responses/{responses[0]}")
        assert (passages(left), documents(left)) == ({""}, documents(whole)), (
            "an answer that stays has none of their text"
        )
        for each in (*responses, cut):
            call("DELETE", f"responses/{each}")
        call("DELETE", f"conversations/{talk}")
        code = json.loads(server.run("devices", "add", "laptop", "--json"))["code"]
        server.run("devices", "revoke", "laptop")
        other = server.make_key("other")
        server.run("keys", "revoke", "other")
        secrets = [key, other, code, code.replace("-", "")]
        assert told(server.state, [*SAID, *secrets]) == {}
        assert {table for table, _ in own_rows(server.state) ^ before} <= KEPT
        server.kill()
        assert told(server.state, [*SAID, *secrets]) == {}
    assert not holding(tmp_path, tuple(word.encode() for word in [*SAID, *secrets]))


Made = tuple[Path, str, str, list[object]]  # an encrypted store, a file and a vector store in it, and what it holds


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    base = tmp_path_factory.mktemp("made")
    file, store = filled(base / "state" / "docs", base, encrypt=True)
    return base / "state" / "docs", file, store, content(base / "state" / "docs", file, store)


def outcome(made: Made, base: Path, change: Callable[[Path], None]) -> str:
    """The outcome of reading a copy with this change: it is told, or harmless, or changed without a word."""
    source, file, store, truth = made
    shutil.copytree(source.parent, base)
    change(base / "docs")
    try:
        found = content(base / "docs", file, store)
    except (PacelineError, FileNotFoundError) as error:
        assert str(error), "a sentence"
        return "told"
    finally:
        shutil.rmtree(base)
    return "harmless" if found == truth else "told" if _is_less(found, truth) else "changed"


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def test_no_flipped_bit_changes_what_is_read(
    made: Made, tmp_path: Path, figure: Figure, size: Size, rng: random.Random
) -> None:
    """A bit of any file of the store, the database's own structure included: each file with the same chance."""

    def flip(docs: Path) -> None:
        paths = sorted(path for path in docs.rglob("*") if path.is_file() and path.stat().st_size)
        path = rng.choice([path for path in paths if not path.name.endswith(("-shm", "-wal"))])
        path.write_bytes(flipped(path.read_bytes(), rng))

    flips = size(30, 1000)
    kinds = Counter(outcome(made, tmp_path / "copy", flip) for _ in range(flips))
    assert content(*made[:3]) == made[3], "the untouched copy opens"
    figure("flipped bits", flips)
    figure("of them in places that hold nothing, or are made anew", kinds["harmless"])
    figure("content changed without a word", kinds["changed"], at_most=0)
    assert not kinds["changed"]


def test_every_flipped_bit_of_a_sealed_value_is_told(
    made: Made, tmp_path: Path, figure: Figure, size: Size, rng: random.Random
) -> None:
    columns = [("documents", "key"), ("documents", "sealed"), ("chunks", "text"), ("chunks", "title"),
               ("texts", "text"), ("files", "key"), ("files", "name"), ("vector_stores", "name"),
               ("vector_stores", "metadata"), ("attached", "attributes")]  # fmt: skip
    of_file = {"files": f" AND id = '{made[1]}'", "attached": f" AND file = '{made[1]}'"}
    flips = size(30, 1000)
    for _ in range(flips):
        table, column = rng.choice(columns)

        def flip(docs: Path, table: str = table, column: str = column) -> None:
            with closing(sqlite3.connect(docs / "documents.sqlite")) as rows:
                full = f"SELECT rowid, {column} FROM {table} WHERE length({column}) > 0{of_file.get(table, '')}"
                row, value = rng.choice(rows.execute(full).fetchall())
                rows.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (flipped(value, rng), row))
                rows.commit()

        assert outcome(made, tmp_path / "copy", flip) == "told", (table, column)
    figure("flipped bits of sealed values told", flips, at_least=flips)


def _is_less(found: object, truth: object) -> bool:
    """True if `found` is `truth` without parts, or with the words that stand for damaged ones: nothing else."""
    if found == truth or found in (None, "", "(damaged)"):
        return True
    if isinstance(found, dict) and isinstance(truth, dict):
        return all(key in truth and _is_less(value, truth[key]) for key, value in found.items())
    if isinstance(found, list | tuple) and isinstance(truth, list | tuple):
        if len(found) == len(truth):
            return all(map(_is_less, found, truth))
        return all(any(_is_less(each, other) for other in truth) for each in found)
    return False
