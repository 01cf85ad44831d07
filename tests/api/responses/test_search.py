"""`file_search`: the vector stores an answer reads, and the results it returns."""

from __future__ import annotations

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
        with serving(service, {"ann": None}) as url:
            yield service, url


@pytest.fixture
def ann(reading: tuple[ScriptedService, str]) -> Iterator[openai.OpenAI]:
    yield from client(reading[1], "ann")


@pytest.fixture
def raw(reading: tuple[ScriptedService, str]) -> Iterator[httpx.Client]:
    with client_of(reading[1], "ann") as made:
        yield made


def test_an_answer_reads_the_named_stores_and_its_search_may_be_sent_back(
    reading: tuple[ScriptedService, str], ann: openai.OpenAI, raw: httpx.Client
) -> None:
    """Its citations: tests/api/vector_stores/test_answers.py."""
    service, _ = reading
    store = ann.vector_stores.create(name="boats").id
    with ann.responses.stream(
        model="scripted",
        input="Whose?",
        tools=[{"type": "file_search", "vector_store_ids": [store], "max_num_results": 3}],
        tool_choice={"type": "file_search"},
    ) as stream:
        kinds = [event.type for event in stream]
        output = [item.to_dict() for item in stream.get_final_response().output]
    assert (service.requests[-1].sources.selection.collections, service.requests[-1].wish.documents) == ((store,), 3)
    assert (output[0]["status"], output[0]["results"]) == ("completed", None)
    at = kinds.index("response.file_search_call.in_progress")
    assert kinds[at : at + 3] == [f"response.file_search_call.{s}" for s in ("in_progress", "searching", "completed")]
    tool = {"type": "file_search", "vector_store_ids": [store]}
    again = raw.post("/v1/responses", json={"model": "scripted", "input": output, "tools": [tool]})
    assert again.status_code == 200 and again.json()["tools"][0]["vector_store_ids"] == [store]


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
    told = {"file_id": file, "filename": "boat.txt", "score": 0.75, "text": BOAT}
    assert [one.to_dict() for one in search.results] == [told | {"attributes": {"year": 1999.0, "red": True}}]


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
