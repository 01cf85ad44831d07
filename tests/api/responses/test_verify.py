"""Stored answers computed again over HTTP and by the command: what is asked, what is kept, and who may."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from typer.testing import Result

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.node import Node
from tests.api.scripted import Script, ScriptedService, Signal, answering, client_of, running, serving
from tests.client.test_conversation import invoked

KEYS: Final = {"pace-one": None, "pace-two": None}
SCHEMA: Final = {"type": "object", "properties": {"day": {"enum": ["monday", "friday"]}}, "required": ["day"]}
TOOL: Final = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "greedy": {"temperature": 0.0, "instructions": "Be brief."},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"101": 2.0}},
    "schema": {"text": {"format": {"type": "json_schema", "name": "day", "schema": SCHEMA, "strict": True}}},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "stop": {"stop": ["a", "e "], "paceline": {"strategy": "autoregressive"}},
    "workflow": {"paceline": {"workflow": "advanced"}},
    "streamed": {"stream": True, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
}


@contextmanager
def served(folder: Path) -> Iterator[tuple[httpx.Client, DocumentStore]]:
    engine = FakeEngine(3, spread=0.3, max_positions=2048)
    with DocumentStore.open(folder / "docs", HashEmbedder()) as store:
        store.add_text("a.txt", "The harbour library opens at eight.", zone="cloud")
        node = Node("cloud", LoadedModel(engine, ByteTokenizer()), store)
        app = create_app(node, keyring=Keyring(KEYS), state=folder / "state")
        with running(app, node) as url, client_of(url, "pace-one") as client:
            yield client, store


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    folder = tmp_path_factory.mktemp("served")
    with served(folder) as (client, _):
        yield client, folder / "state" / "responses.sqlite"


def asked(client: httpx.Client, **body: Any) -> str:
    """The id of an answer that has ended."""
    question = {"model": "fake", "input": "When does the library open?", "max_output_tokens": 30}
    answer = client.post("/v1/responses", json=question | body)
    assert answer.status_code == 200, answer.text
    last = answer.text.split("data: ")[-1] if body.get("stream") else answer.text
    response = json.loads(last)
    response = response.get("response", response)
    assert "written_from" not in answer.text
    return str(response["id"])


def verified(client: httpx.Client, response: str) -> dict[str, Any]:
    answer = client.post(f"/v1/responses/{response}/verify")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def by_command(client: httpx.Client, response: str, *more: str) -> Result:
    return invoked("verify", response, "--url", str(client.base_url), "--key", "pace-one", *more)


def rewrite(log: Path, response: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the stored last event of a response, as nobody should."""
    with closing(sqlite3.connect(log)) as database, database:
        where = "response = ? AND sequence = (SELECT max(sequence) FROM events WHERE response = ?)"
        (data,) = database.execute(f"SELECT data FROM events WHERE {where}", (response, response)).fetchone()
        body = json.loads(data)
        change(body)
        database.execute(f"UPDATE events SET data = ? WHERE {where}", (json.dumps(body).encode(), response, response))


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_proven_and_its_record_is_never_sent(name: str, shared: tuple[httpx.Client, Path]) -> None:
    client, _ = shared
    response = asked(client, **BODIES[name])
    found = verified(client, response)
    kept = client.get(f"/v1/responses/{response}")
    assert (found["differing"], found["not_provable"], found["asked_again"]) == ([], [], 0)
    assert found["proven"] == found["tokens"] >= max(1, kept.json()["usage"]["output_tokens"])
    followed = client.get(f"/v1/responses/{response}", params={"stream": True})
    assert "written_from" not in kept.text + followed.text


def test_a_changed_token_is_shown_and_the_command_says_so_by_its_exit_code(shared: tuple[httpx.Client, Path]) -> None:
    client, log = shared
    response = asked(client, seed=3, previous_response_id=asked(client))
    assert by_command(client, response).exit_code == 0
    owed: list[int] = []

    def change(body: dict[str, Any]) -> None:
        (record,) = body["written_from"]
        owed.append(record["tokens"][4])
        record["tokens"][4] = 65 + (owed[0] == 65)

    rewrite(log, response, change)
    found = verified(client, response)
    first = found["differing"][0]
    assert (first["index"], first["token"], first["expected"]) == (4, 65 + (owed[0] == 65), owed[0])
    assert found["proven"] == found["tokens"] - len(found["differing"])
    shown = by_command(client, response)
    assert shown.exit_code == 1 and f"     4  {first['token']} {first['text']!r}" in shown.stdout
    assert json.loads(by_command(client, response, "--json").stdout) == found


def test_what_it_was_asked_from_or_has_read_may_be_gone(tmp_path: Path) -> None:
    with served(tmp_path) as (client, store):
        first = asked(client)
        second = asked(client, previous_response_id=first)
        client.delete(f"/v1/responses/{first}")
        (gone,) = verified(client, second)["not_provable"]
        assert first in gone["reason"] and gone["tokens"] > 1
        third = asked(client)
        store.remove("a.txt")
        assert verified(client, third)["not_provable"][0]["reason"].startswith("A document that it has read has been")
        assert by_command(client, third).exit_code == 2

        def forget(body: dict[str, Any]) -> None:
            del body["written_from"]

        rewrite(tmp_path / "state" / "responses.sqlite", third, forget)
        unknown = verified(client, third)
        assert unknown["tokens"] == unknown["proven"] == 0 and by_command(client, third).exit_code == 2


def test_another_key_is_told_nothing(shared: tuple[httpx.Client, Path]) -> None:
    client, _ = shared
    response = asked(client)
    stranger = {"authorization": "Bearer pace-two"}
    other = client.post(f"/v1/responses/{response}/verify", headers=stranger)
    followed = client.get(f"/v1/responses/{response}?stream=true", headers=stranger)
    for verb in ("GET", "DELETE"):
        assert client.request(verb, f"/v1/responses/{response}", headers=stranger).status_code == 404
    unknown = client.post("/v1/responses/resp_none/verify")
    assert other.status_code == followed.status_code == unknown.status_code == 404
    assert by_command(client, response, "--key", "pace-two").exit_code == 1


def test_one_that_is_being_written_is_not_judged() -> None:
    service = ScriptedService()
    gate = Signal()
    service.script = Script([gate, *answering("Hello")])
    with serving(service) as url, client_of(url) as client:
        begun = client.post("/v1/responses", json={"model": "scripted", "input": "Hi", "background": True}).json()
        refused = client.post(f"/v1/responses/{begun['id']}/verify")
        gate.set()
    assert refused.status_code == 400 and "has not ended yet" in refused.text
