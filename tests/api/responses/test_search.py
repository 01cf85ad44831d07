"""`file_search`: the vector stores an answer reads, and the results it returns."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from paceline.runtime.service import Citation, TextDelta
from tests.api.responses.test_endpoint import error_of
from tests.api.scripted import Script, ScriptedService, client_of, done, serving
from tests.api.vector_stores.test_files import BOAT, POLL, client, opened


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedService, str]]:
    for service in opened(tmp_path_factory.mktemp("docs")):
        with serving(service, {"ann": None, "bert": None}) as url:
            yield service, url


@pytest.fixture
def ann(reading: tuple[ScriptedService, str]) -> Iterator[openai.OpenAI]:
    yield from client(reading[1], "ann")


@pytest.fixture
def raw(reading: tuple[ScriptedService, str]) -> Iterator[httpx.Client]:
    with client_of(reading[1], "ann") as made:
        yield made


def test_an_answer_reads_the_named_stores_and_cites_their_files(
    reading: tuple[ScriptedService, str], ann: openai.OpenAI
) -> None:
    service, url = reading
    file = ann.files.create(file=("boat.txt", BOAT.encode()), purpose="assistants")
    store = ann.vector_stores.create(name="boats")
    ann.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=POLL)
    cited = Citation("cloud", "boat.txt", BOAT, 0.75, file.id, store.id)
    service.script = Script([TextDelta("Ann's.", 1), done(citations=(cited,), found=(cited,))])
    answer = ann.responses.create(
        model="scripted",
        input="Whose is the red boat?",
        tools=[{"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 3}],
        tool_choice={"type": "file_search"},
        include=["file_search_call.results"],
    )
    asked = service.requests[-1]
    assert (asked.sources.selection.collections, asked.wish.documents) == ((store.id,), 3)
    search, message = answer.output
    assert search.type == "file_search_call" and search.status == "completed"
    assert search.queries == ["Whose is the red boat?"]
    assert search.results is not None and (search.results[0].text, search.results[0].file_id) == (BOAT, file.id)
    assert message.type == "message" and message.content[0].type == "output_text"
    (annotation,) = message.content[0].annotations
    assert annotation.type == "file_citation" and (annotation.file_id, annotation.filename) == (file.id, "boat.txt")

    with ann.responses.stream(
        model="scripted", input="Whose?", tools=[{"type": "file_search", "vector_store_ids": [store.id]}]
    ) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[0].to_dict()["results"] is None
    at = kinds.index("response.file_search_call.in_progress")
    assert kinds[at : at + 3] == [f"response.file_search_call.{s}" for s in ("in_progress", "searching", "completed")]

    tool = {"type": "file_search", "vector_store_ids": [store.id]}
    body = {"model": "scripted", "input": [item.to_dict() for item in answer.output], "tools": [tool]}
    with client_of(url, "bert") as bert:
        assert bert.post("/v1/responses", json=body).status_code == 404, "it is another key's store"
    with client_of(url, "ann") as http:
        again = http.post("/v1/responses", json=body)
        assert again.status_code == 200 and json.loads(again.content)["tools"][0]["vector_store_ids"] == [store.id]


def test_search_results_are_returned_whichever_side_decides_the_answer(
    reading: tuple[ScriptedService, str], ann: openai.OpenAI
) -> None:
    service, _ = reading
    file = ann.files.create(file=("boat.txt", BOAT.encode()), purpose="assistants").id
    store = ann.vector_stores.create(name="boats").id
    ann.vector_stores.files.create_and_poll(
        file, vector_store_id=store, attributes={"year": 1999.0, "red": True}, poll_interval_ms=POLL
    )
    found = (Citation("cloud", "boat.txt", BOAT, 0.75, file, store), Citation("cloud", "old.txt", "Old.", 0.5))
    theirs = Citation("device", "a private document", "", 0.9)
    service.script = Script([TextDelta("Hers.", 1), done(citations=(theirs,), found=found)])
    answer = ann.responses.create(
        model="scripted",
        input="Whose?",
        tools=[{"type": "file_search", "vector_store_ids": ["default", store]}],
        include=["file_search_call.results"],
    )
    search = answer.output[0]
    assert search.type == "file_search_call" and search.results is not None
    assert [one.to_dict() for one in search.results] == [
        {
            "file_id": file,
            "filename": "boat.txt",
            "score": 0.75,
            "text": BOAT,
            "attributes": {"year": 1999.0, "red": True},
        }
    ]


def test_a_filter_holds_for_the_side_s_own_collection_too(
    raw: httpx.Client, reading: tuple[ScriptedService, str]
) -> None:
    tool = {"type": "file_search", "filters": {"type": "eq", "key": "a", "value": 1}}
    assert raw.post("/v1/responses", json={"model": "scripted", "input": "Hi", "tools": [tool]}).status_code == 200
    assert reading[0].requests[-1].sources.selection.document_ids == frozenset()


def test_a_search_that_cannot_be_made_is_refused_by_name(raw: httpx.Client) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"vector_store_ids": ["default"], "max_num_results": 51}, "tools[0].max_num_results"),
        ({"ranking_options": {"score_threshold": 2}}, "tools[0].ranking_options.score_threshold"),
        ({"ranking_options": {"hybrid_search": {}}}, "tools[0].ranking_options.hybrid_search"),
        ({"vector_store_ids": ["default"], "filters": {"type": "in", "key": "a", "value": 1}}, "tools[0].filters"),
    ]
    for tool, param in cases:
        body = {"model": "scripted", "input": "Hi", "tools": [{"type": "file_search"} | tool]}
        answer = raw.post("/v1/responses", json=body)
        assert error_of(answer)[:2] == (400, param), answer.text
