"""Switches behind a model's name, the system message by setting, and addresses of cited passages."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from paceline.api.http.routing import Addresses
from paceline.api.models import read_aliases
from paceline.errors import ConfigError
from paceline.runtime.service import Citation, TextDelta
from tests.api.chat.test_output import whole
from tests.api.generation.test_request import fault, post
from tests.api.scripted import EMBEDDER, MODEL, Script, ScriptedService, done

HERE = Citation("device", "notes.md", "Of the mill.", 0.5, chunk_id=7, place="Mills")


def test_plain_reads_no_documents_and_local_only_sends_nothing(http: httpx.Client, service: ScriptedService) -> None:
    assert post(http, model=f"{MODEL.name}:plain").json()["model"] == f"{MODEL.name}:plain"
    assert service.requests[-1].wish.documents == 0
    post(http, model=f"{MODEL.name}:local-only")
    assert (service.requests[-1].wish.privacy, service.requests[-1].wish.documents) == ("local-only", 2)
    body = {"model": f"{MODEL.name}:plain", "input": "Hi"}
    assert http.post("/v1/responses", json=body).json()["status"] == "completed"
    assert service.requests[-1].wish.documents == 0


def test_an_alias_is_asked_as_its_model_on_every_surface(http: httpx.Client, service: ScriptedService) -> None:
    service.aliases = read_aliases(service, ["gpt-4o", f"fast={MODEL.name}:fast"], ["text-embedding-3-small"])
    messages = [{"role": "user", "content": "Hi"}]
    assert post(http, model="gpt-4o").json()["model"] == "gpt-4o"
    claude = http.post("/v1/messages", json={"model": "gpt-4o", "max_tokens": 9, "messages": messages})
    ollama = http.post("/api/chat", json={"model": "gpt-4o:latest", "messages": messages, "stream": False})
    response = http.post("/v1/responses", json={"model": "gpt-4o", "input": "Hi"})
    assert [answer.status_code for answer in (claude, ollama, response)] == [200, 200, 200]
    assert {request.model for request in service.requests} == {MODEL.name}
    post(http, model="fast")
    assert service.requests[-1].sources.workflow == "fast"
    body = {"model": "text-embedding-3-small", "input": "Hi", "dimensions": 1536}
    assert EMBEDDER.name in fault(http.post("/v1/embeddings", json=body))["message"]
    listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert [name for name in listed if name in service.aliases] == ["gpt-4o", "fast", "text-embedding-3-small"]
    assert [model["name"] for model in http.get("/api/tags").json()["models"]] == listed
    assert http.get("/v1/models/gpt-4o").json()["id"] == "gpt-4o"


@pytest.mark.parametrize("alias", [MODEL.name, f"{MODEL.name}:plain", "a=b", f"a={EMBEDDER.name}"])
def test_an_alias_that_names_nothing_or_a_model_there_is_ends_the_start(service: ScriptedService, alias: str) -> None:
    with pytest.raises(ConfigError, match="alias"):
        read_aliases(service, [alias], [])


def test_an_alias_that_cannot_be_shown_ends_the_start_with_a_sentence(service: ScriptedService) -> None:
    for alias in ("", " gpt-4o", "gpt\x1b[2J", "a\nb", "a\u202eb", "a\x9b", "\udc80", "a" * 65):
        for chat, embedding in ([f"{alias}={MODEL.name}"], []), ([], [alias]):
            with pytest.raises(ConfigError, match="cannot be an alias: use up to 64 printable characters") as refused:
                read_aliases(service, chat, embedding)
            assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("switch", "field", "value"),
    [("plain", "documents", 3), ("local-only", "privacy", "open"), ("fast", "workflow", "research")],
)
def test_a_request_that_contradicts_its_models_name_is_refused(
    http: httpx.Client, service: ScriptedService, switch: str, field: str, value: object
) -> None:
    refused = post(http, model=f"{MODEL.name}:{switch}", paceline={field: value})
    assert fault(refused)["param"] == f"paceline.{field}"
    assert not service.requests


def test_a_conversation_without_a_system_message_gets_the_models(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "models", lambda: (replace(MODEL, system="Be brief."),))
    post(http, messages=[{"role": "user", "content": "Hi"}])
    assert [message["content"] for message in service.requests[-1].prompt.messages] == ["Be brief.", "Hi"]
    post(http, messages=[{"role": "developer", "content": "Be long."}, {"role": "user", "content": "Hi"}])
    assert [message["content"] for message in service.requests[-1].prompt.messages] == ["Be long.", "Hi"]


def test_a_passage_of_this_side_is_cited_with_its_place_and_an_address(
    http: httpx.Client, service: ScriptedService
) -> None:
    service.script = Script([TextDelta("Red", 1), done(citations=(HERE,))])
    answer = whole(http, paceline={"report": True})
    address = f"{str(http.base_url).rstrip('/')}/passage?id=7"
    (annotation,) = answer["choices"][0]["message"]["annotations"]
    assert annotation["url_citation"]["url"] == address
    assert annotation["url_citation"]["title"] == "notes.md, Mills"
    (cited,) = answer["paceline"]["citations"]
    assert (cited["place"], cited["url"]) == ("Mills", address)


def test_addresses_are_those_of_the_side_that_has_the_passage() -> None:
    links = Addresses("http://device:8001", "https://cloud.test/below/")
    there = Citation("cloud", "a b.md", "Text.", 0.5, peer_chunk=3)
    assert links.url(HERE) == "http://device:8001/passage?id=7"
    assert links.url(there) == "https://cloud.test/below/passage?id=3"
    assert Addresses("http://cloud:8000").url(there) == "paceline://cloud/a%20b.md"
    assert links.url(replace(there, url="https://web.test/")) == "https://web.test/"
