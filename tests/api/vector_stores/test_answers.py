"""Answers that read and cite vector stores: a real node with the fake model behind a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from paceline.api.documents import MAX_TOPIC, question_of
from paceline.runtime.resources import NodeParts, Offer
from tests.api.real import serving_documents
from tests.api.scripted import client_of
from tests.api.vector_stores.test_files import BOAT, POLL, client

MODEL = "fake"
OWN = "The red boat of the harbour museum is old."
ASK = "Who owns the red boat?"
ASKABLE = "What is the red boat of the harbour museum?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    parts = NodeParts(offer=Offer(name=MODEL, max_tokens=8))
    with serving_documents(tmp_path_factory.mktemp("docs"), {"own.txt": OWN}, "ann", "bert", parts=parts) as url:
        yield url


@pytest.fixture
def ann(url: str) -> Iterator[openai.OpenAI]:
    yield from client(url, "ann")


@pytest.fixture
def store(ann: openai.OpenAI) -> Iterator[tuple[str, str]]:
    """(vector store, its file)"""
    made = ann.vector_stores.create(name="boats")
    file = ann.vector_stores.files.upload_and_poll(
        vector_store_id=made.id, file=("boat.txt", BOAT.encode()), attributes={"year": 1999}, poll_interval_ms=POLL
    )
    assert file.status == "completed"
    yield made.id, file.id
    ann.vector_stores.delete(made.id)
    ann.files.delete(file.id)


def cited(client: openai.OpenAI, **paceline: object) -> list[dict[str, object]]:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": ASK}],
        temperature=0,
        extra_body={"paceline": {"report": True, "documents": 4, **paceline}},
    )
    citations: list[dict[str, object]] = (answer.model_extra or {})["paceline"]["citations"]
    return citations


def test_a_chat_reads_the_stores_it_names(ann: openai.OpenAI, store: tuple[str, str]) -> None:
    vector_store, file = store
    assert [one["document"] for one in cited(ann)] == ["own.txt"]
    (one,) = cited(ann, vector_stores=[vector_store])
    assert (one["document"], one["file_id"], one["passage"]) == ("boat.txt", file, BOAT)
    both = cited(ann, vector_stores=["default", vector_store])
    assert {one["document"] for one in both} == {"boat.txt", "own.txt"}


def test_a_response_searches_files_and_cites_them(ann: openai.OpenAI, store: tuple[str, str]) -> None:
    vector_store, file = store

    def annotations(**tool: object) -> list[dict[str, object]]:
        response = ann.responses.create(
            model=MODEL,
            input=ASK,
            temperature=0,
            tools=[{"type": "file_search", "vector_store_ids": [vector_store], **tool}],  # type: ignore[list-item,typeddict-item]  # a test's shorthand
            include=["file_search_call.results"],
        )
        search, message = response.output
        assert search.type == "file_search_call" and search.queries == [ASK]
        assert message.type == "message" and message.content[0].type == "output_text"
        assert search.results is not None and len(search.results) == len(message.content[0].annotations)
        for result in search.results:
            assert (result.file_id, result.text, result.attributes) == (file, BOAT, {"year": 1999})
        return [one.model_dump() for one in message.content[0].annotations]

    (one,) = annotations(max_num_results=3)
    assert (one["type"], one["file_id"], one["filename"]) == ("file_citation", file, "boat.txt")
    year = {"type": "gt", "key": "year"}
    assert len(annotations(filters=year | {"value": 1990})) == 1
    assert annotations(filters=year | {"value": 2000}) == []
    assert annotations(ranking_options={"score_threshold": 0.99}) == []


# ---- what can be read -----------------------------------------------------------------------------------------------
def test_documents_are_listed_with_a_question_for_each_and_uploads_are_not(url: str, store: tuple[str, str]) -> None:
    assert store
    with client_of(url, "bert") as http:
        listed = http.get("/v1/documents").json()
        assert http.get("/v1/documents?limit=0").status_code == 400
    assert (listed["side"], listed["total"]) == ("cloud", 1)
    assert listed["data"] == [{"name": "own.txt", "passages": 1, "topic": "own.txt", "question": ASKABLE}]


@pytest.mark.parametrize(
    ("sentence", "question"),
    [
        (
            "The Harbour Library of Tarnwick opens at 8:30 in the morning.",
            "When does the Harbour Library of Tarnwick open?",
        ),
        ("My aunt's boat was built by Edda Marlow.", "Who was my aunt's boat built by?"),
        ("Our landlord is Mr Velda.", "Who is our landlord?"),
        ("My friend Bram works as a night baker.", "What does my friend Bram work as?"),
        ("The password for our wifi is copper lantern.", "What is the password for our wifi?"),
        ("A ticket for the ferry costs 4 euros.", "How much does a ticket for the ferry cost?"),
        ("It was built by Edda Marlow.", None),
        ("The town is loved by", None),
    ],
)
def test_a_question_is_made_of_a_sentence_that_answers_it(sentence: str, question: str | None) -> None:
    assert question_of(["Remember to buy milk.", sentence]) == question


def test_what_documents_are_called_and_asked_is_one_short_line_that_hides_nothing(tmp_path: Path) -> None:
    hidden = "\u202e\u2066\x1b[2J\x07\x9b\u200b\U000e0041\u2028"
    texts = {
        "0.md": f"# The key{hidden}\n\nThe pass{hidden}word for our wifi is lan{hidden}tern.",
        "1.md": "# " + "Key " * 99 + "\n\nNothing.",
    }
    with serving_documents(tmp_path, texts) as url, client_of(url) as http:
        askable, long = http.get("/v1/documents").json()["data"]
    assert (askable["topic"], askable["question"]) == ("The key [2J", "What is the pass [2J word for our wifi?")
    assert long["topic"] == ("Key " * 99)[:MAX_TOPIC] and long["question"] is None


# ---- cited passages -------------------------------------------------------------------------------------------------
def test_a_cited_passage_opens_at_its_address_for_whoever_may_read_it(url: str, ann: openai.OpenAI) -> None:
    answer = ann.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "red harbour boat museum"}])
    (annotation, *_) = answer.choices[0].message.model_dump()["annotations"]
    address = annotation["url_citation"]["url"]
    number = address.rpartition("=")[2]
    with client_of(url) as http:
        page = http.get(address)
        assert page.status_code == 200 and "text/html" in page.headers["content-type"], "a page that needs no key"
        assert http.get(f"/v1/passages/{number}").status_code == 401
        for key in ("ann", "bert"):
            shown = http.get(f"/v1/passages/{number}", headers={"authorization": f"Bearer {key}"}).json()
            assert (shown["document"], shown["text"], shown["place"]) == ("own.txt", OWN, "")


def test_no_other_number_opens_anything(url: str) -> None:
    with client_of(url, "ann") as http:
        for number in ("0", "-1", "x", "9" * 18, "9" * 40, "%00", "1%20OR%201"):
            assert http.get(f"/v1/passages/{number}").status_code in (400, 404), number


def test_a_passage_opens_between_its_neighbours(url: str, ann: openai.OpenAI) -> None:
    text = "".join(f"The boat number {n} of Ann lies at the pier number {n}. " for n in range(120))
    file = ann.files.create(file=("boats.txt", text.encode()), purpose="assistants")
    store = ann.vector_stores.create(file_ids=[file.id])
    ann.vector_stores.files.poll(file.id, vector_store_id=store.id, poll_interval_ms=POLL)
    with client_of(url, "ann") as http:
        shown = [http.get(f"/v1/passages/{number}").json() for number in range(1, 60)]
    one = [each for each in shown if each.get("document") == "boats.txt"][3]
    assert len(one["before"]) == len(one["after"]) == 2
    places = [text.index(part[:60]) for part in (*one["before"], one["text"], *one["after"])]
    assert places == sorted({*places})
