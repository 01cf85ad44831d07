"""R9: a process killed while it reads or deletes documents leaves each of them whole or absent, encrypted or not.

And a server killed while commands work on the same databases: keys, devices, documents, responses, look-up tables.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import command
from paceline.rag.embedder import HashEmbedder
from paceline.rag.rows import read_passages
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from tests.e2e.pair import running_pair
from tests.postgres import home, rows, sound
from tests.rag.store import test_documents_crash as managed
from tests.rag.store import test_library_crash as uploaded
from tests.reliability.conftest import Figure, Size

SENTENCES = {managed.CHANGER: 20, uploaded.CHANGER: 40}  # of each text that a changer writes


def whole(folder: Path, sentences: int) -> tuple[int, int]:
    """Assert that every document, upload and vector is whole. Returns the numbers of documents and uploads."""
    sound(folder)
    with DocumentStore.open(folder, HashEmbedder()) as store:
        library = Library(store, "cloud")
        try:
            with store._database.reading() as database:
                counts = dict(database.execute("SELECT id, num_chunks FROM documents").fetchall())
                files = dict(database.execute("SELECT id, bytes FROM files").fetchall())
                texts: dict[str, list[str]] = {document: [] for document in counts}
                of = dict(database.execute("SELECT id, document FROM chunks").fetchall())
                for passage in read_passages(database, "", strict=True):
                    texts[of[passage.chunk_id]].append(passage.text)
            store.search("sentence", 1)
            indexed = set(store._index._vector_index.ids.tolist())
            assert indexed == of.keys(), "a vector without a row, or a row without a vector"
            for document, parts in texts.items():
                assert len(parts) == counts[document]
                said = " ".join(parts)
                assert len(set(re.findall(r"version v\d+", said))) == 1
                assert len(set(re.findall(r"Sentence \d+ ", said))) == sentences
            for file, num_bytes in files.items():
                with library.uploads.open(file) as content:
                    data = content.read()
                assert len(data) == num_bytes and data.count(b"Sentence") == sentences
        finally:
            library.close()
    return len(counts), len(files)


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_a_kill_at_any_step_leaves_each_document_whole_or_absent(
    tmp_path: Path, encrypt: bool, figure: Figure, size: Size, rng: random.Random
) -> None:
    seen = set()
    kills = size(6, 100)
    for number in range(kills):
        changer, most = ((managed.CHANGER, 300), (uploaded.CHANGER, 600))[number % 2]
        folder = tmp_path / f"store{number % 2}"
        step = str(rng.randrange(10, most))
        arguments = [sys.executable, "-c", changer, str(folder), step, *(["encrypt"] if encrypt else [])]
        done = subprocess.run(arguments, capture_output=True, timeout=120, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        seen.add((number % 2, *whole(folder, SENTENCES[changer])))
    figure(f"kills, {'encrypted' if encrypt else 'plain'}", kills)
    assert len(seen) > 2, "the kills hit nothing"


@pytest.mark.usefixtures("kept")
def test_commands_beside_a_server_lose_nothing_and_revocations_are_heard(
    tmp_path: Path, figure: Figure, size: Size
) -> None:
    rounds = size(1, 20)
    with running_pair(tmp_path) as pair:
        state, url = tmp_path / "cloud", pair.url("cloud")

        def run(*arguments: str) -> str:
            return pair.children.run(command(*arguments))

        def call(method: str, path: str, key: str, **more: object) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.request(method, url + path, headers=headers, timeout=60.0, trust_env=False, **more)  # type: ignore[arg-type]

        def make_key(name: str) -> str:
            return str(json.loads(run("keys", "create", name, "--state-dir", str(state), "--json"))["key"])

        def add_document(name: str) -> str:
            (tmp_path / f"{name}.md").write_text(f"The door of {name} is green.")
            where = ("--side", "cloud", "--state-dir", str(state), "--embedder", "hash")
            return run("docs", "add", str(tmp_path / f"{name}.md"), *where)

        key = make_key("first")
        uploads, responses, names = [], [], []
        for number in range(rounds):
            with ThreadPoolExecutor() as beside:
                commands = [
                    beside.submit(make_key, f"key-{number}"),
                    beside.submit(run, "devices", "add", f"device-{number}", "--state-dir", str(state)),
                    beside.submit(add_document, f"note-{number}"),
                    beside.submit(run, "tables", "list", "--side", "cloud", "--state-dir", str(state)),
                ]
                while not all(each.done() for each in commands):
                    upload = {"file": ("a.txt", f"upload {len(uploads)}")}
                    answer = call("POST", "/v1/files", key, files=upload, data={"purpose": "assistants"})
                    uploads.append(answer.json()["id"])
                    body = {"model": "fake", "input": "a question", "max_output_tokens": 4}
                    responses.append(call("POST", "/v1/responses", key, json=body).json()["id"])
                for each in commands:
                    each.result()
            names.append(f"note-{number}.md")
        revoked = make_key("last")
        run("keys", "revoke", "last", "--state-dir", str(state))
        began = time.monotonic()
        while call("GET", "/v1/models", revoked).status_code != 401:
            assert time.monotonic() - began < 30
        figure("key refused after its revocation", time.monotonic() - began, at_most=1.0, unit="s")
        run("devices", "revoke", "laptop", "--state-dir", str(state))
        began = time.monotonic()
        while httpx.get(f"{url}/readyz", trust_env=False).json()["linked"]:
            assert time.monotonic() - began < 30
        figure("device's link cut after its revocation", time.monotonic() - began, at_most=1.0, unit="s")
        run("tables", "erase", "--all", "--side", "cloud", "--state-dir", str(state))
        pair.started.cloud.process.kill()  # as in a power cut
        pair.started.cloud.process.wait()
        pair.children.members.remove(pair.started.cloud)
        sound(tmp_path)
        listed = json.loads(run("keys", "list", "--state-dir", str(state), "--json"))
        kept = {row["name"]: row["state"] for row in listed}
        wanted = {f"key-{number}": "valid" for number in range(rounds)} | {"last": "revoked"}
        assert kept == wanted | {"first": "valid"}
        added = run("devices", "list", "--state-dir", str(state), "--json")
        assert '"laptop"' in added, added
    with DocumentStore.open(state / "docs", HashEmbedder(), side="cloud", home=home(state)) as store:
        assert {document.name for document in store.documents()} >= set(names)
        library = Library(store, "cloud")
        for file in uploads:
            with library.uploads.open(file) as content:
                assert content.read().startswith(b"upload ")
        library.close()
    assert {row[0] for row in rows(state / "responses.sqlite", "SELECT id FROM responses")} >= set(responses)
    figure("acknowledged writes", len(uploads) + len(responses) + 3 * rounds)
