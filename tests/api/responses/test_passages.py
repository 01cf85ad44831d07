"""Passages of documents in stored responses: read as long as the document is there, and in no file of the log."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.api.http.body import encode_json
from paceline.api.responses.events import replay, stored_form
from paceline.api.responses.log import EventLog
from paceline.runtime.service import Citation
from tests.api.responses.test_event_log import record, rest_of
from tests.api.scripted import done

pytestmark = pytest.mark.anyio

OWN, FILED, THEIRS = "my own passage", "the passage of a file", "a passage of the other side"
HEADING = "a heading"
Chunks = dict[int, tuple[str, str]]  # chunk ids → (text, place)
CITED = (
    Citation("device", "a.md", OWN, 0.75, chunk_id=3, place=HEADING),
    Citation("device", "b.txt", FILED, 0.5, "file-1", "vs_1", 4),
    Citation("cloud", "c.md", THEIRS, 0.25, place="of the other side"),
)
LAST = {
    "type": "response.completed",
    "sequence_number": 1,
    "response": {
        "output": [
            {"type": "file_search_call", "results": [{"file_id": "file-1", "text": FILED, "attributes": {}}]},
            {"type": "message", "content": [{"text": f"It says: {OWN}, ü"}]},
        ],
        "paceline": {
            "citations": [
                {"document": one.document, "passage": one.passage, **({"place": one.place} if one.place else {})}
                for one in CITED
            ]
        },
    },
}
DONE = done("stop", citations=CITED, found=CITED)


def passages(data: bytes) -> list[str]:
    response = json.loads(data)["response"]
    results = [result["text"] for result in response["output"][0]["results"]]
    return [*results, *(citation["passage"] for citation in response["paceline"]["citations"])]


def places(data: bytes) -> list[str | None]:
    return [citation.get("place") for citation in json.loads(data)["response"]["paceline"]["citations"]]


@pytest.fixture
async def chunks(tmp_path: Path) -> AsyncIterator[Chunks]:
    """Chunks, to which a stored response refers."""
    known = {3: (OWN, HEADING), 4: (FILED, "")}
    log = EventLog(tmp_path)
    live = log.begin(record("a"), stored=True)
    reader = log.follow("a")
    await log.append(live, [("response.created", b'{"response": {"output": []}}')])
    last = [("response.completed", encode_json(LAST))]
    log.append_nowait(live, last, last=True, stored_last=stored_form(LAST, DONE))
    rows = await rest_of(reader)
    assert passages(rows[-1].data) == [FILED, OWN, FILED, THEIRS], "as it was written, for those who read it meanwhile"
    log.close()
    yield known


async def test_passages_are_read_while_their_document_is_there(tmp_path: Path, chunks: Chunks) -> None:
    log = EventLog(tmp_path, passages=lambda ids: {each: chunks[each] for each in {*ids} & {*chunks}})
    for removed, expected, heading in (
        (0, [FILED, OWN, FILED, ""], HEADING),
        (3, [FILED, "", FILED, ""], None),
        (4, ["", "", "", ""], None),
    ):
        chunks.pop(removed, None)  # first: of none
        last = await log.last("a")
        assert last is not None and passages(last.data) == expected
        assert places(last.data) == [heading, None, None]
        assert (await log.all("a"))[-1] == last == (await rest_of(log.follow("a")))[-1]
        assert replay([last])["output"][1] == LAST["response"]["output"][1]  # type: ignore[index]  # a literal
    log.close()


@pytest.mark.usefixtures("chunks")
async def test_a_passage_whose_number_another_text_has_now_is_gone(tmp_path: Path) -> None:
    log = EventLog(tmp_path, passages=lambda ids: {each: ("another owner's text", "there") for each in ids})
    last = await log.last("a")
    assert last is not None and passages(last.data) == ["", "", "", ""] and places(last.data) == [None] * 3
    log.close()


@pytest.mark.usefixtures("chunks")
async def test_passages_are_in_no_file(tmp_path: Path) -> None:
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"It says" in written
    assert [text for text in (FILED, THEIRS, HEADING) if text.encode() in written] == []
    assert written.count(OWN.encode()) == 1, "what the model has written is the answer, and kept"


def test_a_last_event_without_passages_is_stored_as_it_is() -> None:
    assert stored_form({"response": {"output": [{"type": "file_search_call", "results": None}]}}, DONE) is None
    assert stored_form({"response": {"output": [], "paceline": {"degraded": "cloud_lost"}}}, DONE) is None
