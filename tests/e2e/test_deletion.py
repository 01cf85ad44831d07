"""A deleted document leaves nothing on disk of either side: real programs, and commands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.demo import Children
from paceline.strategies.base import SIDES
from tests.e2e.pair import DOCUMENTS, Server, running_pair
from tests.e2e.test_identity import eventually

MANAGED = "The vault behind the quixotic mill opens with the word zanzibar."


UPLOADED = "The cellar below the quixotic inn opens with the word yggdrasil."


MARKS = (b"zanzibar", b"yggdrasil")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Children(tmp_path) as children:
        yield Server(children, tmp_path)


def holding(folder: Path, mark: bytes) -> set[str]:
    """Names of the files below the folder that hold the mark."""
    found = set()
    for path in folder.rglob("*"):
        try:
            if path.is_file() and mark in path.read_bytes():
                found.add(path.name)
        except FileNotFoundError:  # a temporary file
            continue
    return found


def attached(server: Server, name: str, text: str) -> tuple[str, str]:
    """Ids of a file and of a vector store in which it has been read."""
    answer = server.call("POST", "/v1/files", files={"file": (name, text)}, data={"purpose": "assistants"})
    file = answer.json()["id"]
    store = server.call("POST", "/v1/vector_stores", json={"file_ids": [file]}).json()["id"]
    url = f"/v1/vector_stores/{store}/files/{file}"
    eventually(lambda: server.call("GET", url).json()["status"] == "completed", "it is not read")
    return file, store


def passages(response: dict[str, Any]) -> list[str]:
    results = [result["text"] for item in response["output"] for result in item.get("results") or ()]
    return [*results, *(citation["passage"] for citation in response["paceline"]["citations"])]


def test_a_removed_document_is_in_no_file_and_in_no_stored_response(server: Server, tmp_path: Path) -> None:
    note = tmp_path / "vault.md"
    note.write_text(MANAGED)
    server.docs("add", str(note))
    note.unlink()
    file, store = attached(server, "cellar.txt", UPLOADED)
    body = {
        "model": "fake",
        "input": "Which word opens the quixotic vault and the quixotic cellar?",
        "max_output_tokens": 32,
        "include": ["file_search_call.results"],
        "tools": [{"type": "file_search", "vector_store_ids": ["default", store]}],
        "paceline": {"report": True, "documents": 4},
    }
    answer = server.call("POST", "/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response = answer.json()
    assert {MANAGED, UPLOADED} <= set(passages(response))
    url = f"/v1/responses/{response['id']}"
    assert server.call("GET", url).json() == response, "read again while the documents are there"
    for mark in MARKS:
        assert all(name.startswith(("documents.sqlite", "file-")) for name in holding(server.state, mark))
    server.docs("remove", "vault.md")
    assert not {MANAGED} & set(passages(server.call("GET", url).json()))
    assert server.call("DELETE", f"/v1/files/{file}").status_code == 200
    left = server.call("GET", url).json()
    assert set(passages(left)) == {""}
    assert [each["document"] for each in left["paceline"]["citations"]] == [
        each["document"] for each in response["paceline"]["citations"]
    ]
    assert [holding(server.state, mark) for mark in MARKS] == [set(), set()]
    server.kill()
    assert [holding(server.state, mark) for mark in MARKS] == [set(), set()]


def test_joint_answers_leave_no_table_and_no_passage_on_either_side(tmp_path: Path) -> None:
    texts = {side: text.strip() for side, text in DOCUMENTS.items()}
    question = " ".join(reversed(" ".join(texts.values()).split()))  # found by its words, and not a quotation
    cited = set()
    with running_pair(tmp_path) as pair:
        for side in SIDES:
            with pair.client(side) as client:
                for strategy in ("aggregate", "lookup_tree"):
                    response = client.responses.create(
                        model="fake",
                        input=question,
                        max_output_tokens=32,
                        temperature=0.0,
                        extra_body={"paceline": {"strategy": strategy, "report": True}},
                    ).to_dict()
                    report: Any = response["paceline"]
                    assert report["strategy"] == strategy and report["degraded"] is None
                    cited.update((side, citation["passage"]) for citation in report["citations"])
        for file in tmp_path.glob("*.md"):
            file.unlink()
    assert cited >= set(texts.items())
    for text in texts.values():
        assert {name.split("-")[0] for name in holding(tmp_path, text.encode())} <= {"documents.sqlite"}
    assert not list(tmp_path.rglob("tables/*.safetensors"))
