"""Switches behind a model's name, workflows, energy, the system message by setting, and addresses of passages."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from paceline.api.http.routing import Addresses
from paceline.api.models import read_aliases
from paceline.core.energy import Energy, EnergyUse
from paceline.errors import ConfigError
from paceline.runtime.service import Citation, TextDelta, WorkflowStep
from tests.api.chat.test_output import stream, whole
from tests.api.conftest import BODY
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
    for path, known in (("/v1/responses", "gpt-4o, fast"), ("/v1/embeddings", "text-embedding-3-small")):
        told = fault(http.post(path, json={"model": "nosuch", "input": "Hi"}), 404)
        assert str(told["message"]).endswith(f", {known}.")
    body = {"model": "text-embedding-3-small", "input": "Hi", "dimensions": 1536}
    assert EMBEDDER.name in fault(http.post("/v1/embeddings", json=body))["message"]
    listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert [name for name in listed if name in service.aliases] == ["gpt-4o", "fast", "text-embedding-3-small"]
    assert [model["name"] for model in http.get("/api/tags").json()["models"]] == listed
    assert http.get("/v1/models/gpt-4o").json()["id"] == "gpt-4o"


def test_an_alias_that_cannot_be_one_ends_the_start_with_a_sentence(service: ScriptedService) -> None:
    for alias in (MODEL.name, f"{MODEL.name}:plain", "a=b", f"a={EMBEDDER.name}"):
        with pytest.raises(ConfigError, match="alias"):
            read_aliases(service, [alias], [])
    for alias in ("", " gpt-4o", "gpt\x1b[2J", "a\nb", "a\u202eb", "a\x9b", "\udc80", "a" * 65):
        for chat, embedding in ([f"{alias}={MODEL.name}"], []), ([], [alias]):
            with pytest.raises(ConfigError, match="cannot be an alias: use up to 64 printable characters") as refused:
                read_aliases(service, chat, embedding)
            assert str(refused.value).isprintable()


def test_what_means_nothing_or_contradicts_the_models_name_is_refused_by_name(
    http: httpx.Client, service: ScriptedService
) -> None:
    cases: list[tuple[str, str, object, str]] = [
        (":plain", "documents", 3, ""),
        (":local-only", "privacy", "open", ""),
        (":fast", "workflow", "research", ""),
        ("", "workflow", "slow", ""),
        ("", "energy", 5, ""),
        ("", "energy", {"joules": 1}, ".joules"),
        ("", "energy", {"joules_per_token": -1}, ".joules_per_token"),
        ("", "energy", {"joules_per_step": 1e7}, ".joules_per_step"),
        ("", "energy", {"objective": "renewal"}, ".objective"),
        ("", "energy", {"joules_per_token": 1, "joules_per_step": 1}, ""),
    ]
    for switch, field, value, within in cases:
        refused = post(http, model=f"{MODEL.name}{switch}", paceline={field: value})
        assert fault(refused)["param"] == f"paceline.{field}{within}"
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


# ---- workflows, by field or by the model's name, and the steps that a client is told of ------------------------------
STEP = WorkflowStep("rewrite", "done", "engine 0", 0.25, "Where is the broom?")
FAILED = WorkflowStep("search far", "failed", "link", 1.0, "the other side's documents are not read")
LINES = (
    "rewrite, 0.25 s on engine 0: Where is the broom?\n"
    "search far (failed), 1.00 s on link: the other side's documents are not read\n"
)


@pytest.mark.parametrize(
    ("model", "extension", "asked"),
    [
        (MODEL.name, {}, None),
        (MODEL.name, {"workflow": "fast"}, "fast"),
        (f"{MODEL.name}:research", {}, "research"),
        (f"{MODEL.name}:advanced", {"workflow": "advanced"}, "advanced"),
    ],
)
def test_a_workflow_is_asked_for_by_field_or_name(
    http: httpx.Client, service: ScriptedService, model: str, extension: dict[str, object], asked: str | None
) -> None:
    answer = post(http, model=model, paceline=extension)
    assert answer.json()["model"] == model
    assert service.requests[-1].sources.workflow == asked


def test_the_list_has_a_switch_for_each_workflow_that_can_be_done_after_the_models(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [model.name for model in service.models()]
    for workflows in (service.workflows(), ("fast", "advanced")):
        monkeypatch.setattr(service, "workflows", lambda known=workflows: known)
        listed = [each["id"] for each in http.get("/v1/models").json()["data"]]
        assert listed[: len(plain)] == plain
        assert [name for name in listed if name.startswith(f"{MODEL.name}:")] == [
            f"{MODEL.name}:{switch}" for switch in ("plain", "local-only", *workflows)
        ]


def test_steps_are_reasoning_in_a_stream_and_as_a_whole(http: httpx.Client, service: ScriptedService) -> None:
    steps = [TextDelta("", 0, step=step) for step in (STEP, FAILED)]
    service.script = Script([*steps, TextDelta("Hi", 2), done(steps=(STEP, FAILED))])
    chunks = stream(http, paceline={"workflow": "advanced", "steps": True})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == LINES
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hi"
    told = [chunk["paceline"]["step"]["unit"] for chunk in chunks if "step" in chunk.get("paceline", {})]
    assert told == ["engine 0", "link"]
    message = whole(http, paceline={"workflow": "advanced", "steps": True})["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi", LINES)


# ---- joules, in every endpoint that generates text -------------------------------------------------------------------
USE = EnergyUse("rapl", Energy(1.5), Energy(0.5, measured=False))
REPORTED = {
    "device": {
        "meter": "rapl",
        "joules": 2.0,
        "joules_per_token": 1.0,
        "computed": {"joules": 1.5, "source": "measured"},
        "sent": {"joules": 0.5, "source": "modelled"},
    }
}


def test_a_report_has_the_joules_of_the_side_and_their_source(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([TextDelta("Hi", 2), done(energy={"device": USE}, completion_tokens=2)])
    report = {"paceline": {"report": True}}
    assert stream(http, **report)[-1]["paceline"]["energy"] == REPORTED
    asked = {"completions": {"prompt": [1, 2]}, "responses": {"input": "Hi"}, "chat/completions": BODY}
    for path, fields in asked.items():
        answer = http.post(f"/v1/{path}", json={"model": "scripted", **fields, **report})
        assert answer.json()["paceline"]["energy"] == REPORTED


def test_a_budget_reaches_the_strategy(http: httpx.Client, service: ScriptedService) -> None:
    asked = {"joules_per_token": 0.25}
    assert post(http, paceline={"energy": asked}).status_code == 200
    assert post(http, paceline={"energy": {"joules_per_step": 1.2}}).status_code == 200
    assert post(http).status_code == 200
    first, second, none = (dict(request.wish.options) for request in service.requests)
    assert {name: first[name] for name in asked} == asked and second["joules_per_step"] == 1.2
    assert "joules_per_token" not in none
