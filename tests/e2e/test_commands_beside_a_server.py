"""`paceline keys`, `devices` and `docs` as processes beside running programs.

Each change takes effect, none is lost, and no database is damaged, not even by `kill -9`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.commands.demo import Child, Children, command, free_port
from tests.postgres import sound

TIMEOUT_S = 20.0  # for a change to take effect, on a busy machine


class Server:
    """`paceline serve` with its own documents, and the commands and requests of its users."""

    def __init__(self, children: Children, directory: Path) -> None:
        self._children = children
        self.state = directory / "state"
        self._port = free_port(0)
        self._key = ""
        self.child: Child
        self.start()

    def start(self) -> None:
        flags = ("--model", "fake", "--port", str(self._port), "--state-dir", str(self.state))
        self.child = self._children.start("cloud", command("serve", *flags), port=self._port)
        self._children.wait(lambda reports: all(reports))

    def kill(self) -> None:
        os.kill(self.child.process.pid, signal.SIGKILL)
        self.child.process.wait()
        self._children.members.remove(self.child)

    def run(self, *arguments: str) -> str:
        return self._children.run(command(*arguments, "--state-dir", str(self.state)))

    def docs(self, *arguments: str) -> str:
        flags = ("--side", "cloud", "--state-dir", str(self.state), "--embedder", "hash")
        return self._children.run(command("docs", *arguments, *flags))

    def make_key(self, name: str) -> str:
        made: str = json.loads(self.run("keys", "create", name, "--json"))["key"]
        return made

    def call(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.child.url}{path}", headers=headers, timeout=60.0, trust_env=False, **more)

    def status(self, key: str | None = None) -> int:
        """Status of a request that needs a key as soon as one exists."""
        return self.call("GET", "/v1/models", key).status_code

    def cited(self, question: str) -> set[str]:
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
            answer = self.call("POST", "/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            found |= {cited["document"] for cited in answer.json()["paceline"]["citations"]}
        return found

    def upload(self, name: str) -> str:
        answer = self.call("POST", "/v1/files", files={"file": (name, name * 20)}, data={"purpose": "assistants"})
        assert answer.status_code == 200, answer.text
        made: str = answer.json()["id"]
        return made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Children(tmp_path) as children:
        yield Server(children, tmp_path)


def eventually(held: Callable[[], bool]) -> bool:
    """Poll until `held` is true; False after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while not held():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_keys_made_and_revoked_hold_from_the_next_request_on(server: Server) -> None:
    assert server.status() == 200
    first = server.make_key("first")
    assert (server.status(), server.status("wrong"), server.status(first)) == (401, 401, 200)
    second = server.make_key("second")
    assert (server.status(first), server.status(second)) == (200, 200)
    server.run("keys", "revoke", "first")
    assert (server.status(first), server.status(second)) == (401, 200)
    third = server.make_key("third")
    assert server.status(third) == 200
    server.kill()
    sound(server.state)
    server.start()
    assert [server.status(key) for key in (None, first, second, third)] == [401, 401, 200, 200]


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
        assert server.cited(f"door of mill {number}") >= {name}
        uploads.append(server.upload(f"after-{number}.txt"))
    server.docs("remove", "mill-1.md")
    documents.discard("mill-1.md")
    assert "mill-1.md" not in server.cited("door of mill 1")
    uploads.append(server.upload("after-removing.txt"))
    server.kill()
    sound(server.state)
    server.start()
    assert server.cited("door of mill 1") == documents
    assert {server.call("GET", f"/v1/files/{each}/content").status_code for each in uploads} == {200}
    assert json.loads(server.docs("list", "--json")), "the command reads what the server has kept"
