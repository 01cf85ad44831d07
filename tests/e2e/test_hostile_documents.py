"""Hostile files uploaded to a real server: everybody else is served while they are parsed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import Children, command, free_port
from tests.rag.parsing.made import ENDLESS, archive


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    port = free_port(0)
    with Children(tmp_path) as children:
        flags = ["--model", "fake", "--port", str(port), "--state-dir", str(tmp_path / "state")]
        keys = ["--api-keys", "ann", "--api-keys", "bert"]
        server = children.start("cloud", command("serve", *flags, *keys), port=port)
        children.wait(lambda said: all(said))
        yield server.url


class Client(httpx.Client):
    """One key's client, which checks that the server is there before each look."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(base_url=url, timeout=60.0, trust_env=False, headers={"Authorization": f"Bearer {key}"})

    def attach(self, name: str, data: bytes) -> str:
        """Path of the file in a new vector store."""
        file = self.post("/v1/files", files={"file": (name, data)}, data={"purpose": "assistants"}).json()["id"]
        store = self.post("/v1/vector_stores", json={"name": "notes", "file_ids": [file]}).json()["id"]
        return f"/v1/vector_stores/{store}/files/{file}"

    def settled(self, path: str) -> dict[str, object]:
        """The file's object once it has been read or refused."""
        while (found := self.get(path).json())["status"] == "in_progress":
            assert self.get("/healthz").status_code == 200
        return dict(found)


def test_bombs_of_one_key_stop_nobody_and_say_why_they_are_refused(url: str) -> None:
    with Client(url, "ann") as ann, Client(url, "bert") as bert:
        heading = b"# x" + b" " * (64 * 1024) + b"x\n\nThe mill is red.\n"
        assert ann.settled(ann.attach("a.md", heading))["status"] == "completed"
        bomb = ann.attach("bomb.docx", archive({"word/document.xml": bytes(64 * 2**20)}))
        refused = ann.settled(bomb)
        assert refused["status"] == "failed"
        error = refused["last_error"]
        assert isinstance(error, dict) and error["code"] == "invalid_file"
        assert "bomb.docx would unpack to 64 MiB" in error["message"]

        endless = ann.attach("endless.rtf", ENDLESS)
        note = bert.attach("note.html", "<h1>Mill</h1><p>The mill is red.".encode("utf-16"))
        assert bert.settled(note)["status"] == "completed"
        assert bert.get(f"{note}/content").json()["data"][0]["text"] == "# Mill\n\nThe mill is red."
        answer = bert.post("/v1/completions", json={"model": "fake", "prompt": "The mill", "max_tokens": 4})
        assert answer.status_code == 200
        assert ann.get(endless).json()["status"] == "in_progress", "all this while it was parsed"
