"""`paceline keys`, `devices` and `docs` as processes beside running programs.

Each change takes effect, none is lost, and no database is damaged, not even by `kill -9`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.commands.demo import Children
from tests.e2e.pair import Server
from tests.postgres import sound


def status(server: Server, key: str | None = None) -> int:
    """Status of a request that needs a key as soon as one exists."""
    return server.call("GET", "/v1/models", key).status_code


def cited(server: Server, question: str) -> set[str]:
    """Documents cited by answers to the question. One answer of a token cites only those that decided it."""
    found: set[str] = set()
    for seed in range(24):
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 1,
            "seed": seed,
            "paceline": {"documents": 8, "report": True},
        }
        answer = server.call("POST", "/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found |= {each["document"] for each in answer.json()["paceline"]["citations"]}
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Children(tmp_path) as children:
        yield Server(children, tmp_path)


def test_keys_made_and_revoked_hold_from_the_next_request_on(server: Server) -> None:
    assert status(server) == 200
    first = server.make_key("first")
    assert (status(server), status(server, "wrong"), status(server, first)) == (401, 401, 200)
    second = server.make_key("second")
    assert (status(server, first), status(server, second)) == (200, 200)
    server.run("keys", "revoke", "first")
    assert (status(server, first), status(server, second)) == (401, 200)
    third = server.make_key("third")
    assert status(server, third) == 200
    server.kill()
    sound(server.state)
    server.start()
    assert [status(server, key) for key in (None, first, second, third)] == [401, 401, 200, 200]


def test_documents_added_removed_and_uploaded_beside_each_other_are_all_there(server: Server, tmp_path: Path) -> None:
    uploads, documents = [], set()
    for number in range(3):
        name = f"mill-{number}.md"
        (tmp_path / name).write_text(f"The door of mill {number} is painted in colour {number}.\n")
        with ThreadPoolExecutor() as beside:
            adding = beside.submit(server.docs, "add", str(tmp_path / name))
            while not adding.done():
                uploads.append(server.upload(f"upload-{number}-{len(uploads)}.txt"))
            adding.result()
        documents.add(name)
        assert cited(server, f"door of mill {number}") >= {name}
        uploads.append(server.upload(f"after-{number}.txt"))
    server.docs("remove", "mill-1.md")
    documents.discard("mill-1.md")
    assert "mill-1.md" not in cited(server, "door of mill 1")
    uploads.append(server.upload("after-removing.txt"))
    server.kill()
    sound(server.state)
    server.start()
    assert cited(server, "door of mill 1") == documents
    assert {server.call("GET", f"/v1/files/{each}/content").status_code for each in uploads} == {200}
    assert json.loads(server.docs("list", "--json")), "the command reads what the server has kept"
