"""Conversations: what was said in several responses under one id, through OpenAI's client."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

from paceline.api.http.auth import Identity
from paceline.api.http.body import PageQuery
from paceline.api.responses.conversations import items_of, list_conversations
from paceline.api.responses.log import EventLog, Retention
from paceline.api.responses.store import MAX_CONVERSATION, EventStore, ResponseRecord
from paceline.errors import PacelineError, RequestError
from paceline.rag.store.files import Paging
from paceline.runtime.service import Citation
from tests.api.generation.test_request import fault
from tests.api.scripted import Script, ScriptedService, answering, serving

ORDERS: tuple[Literal["asc", "desc"], ...] = ("asc", "desc")

pytestmark = pytest.mark.anyio


def said(client: openai.OpenAI, conversation: str) -> list[tuple[str, str]]:
    items: list[Any] = list(client.conversations.items.list(conversation, order="asc"))
    return [(item.role, item.content[0].text) for item in items]


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.responses.create(model="scripted", input=text, **fields)


def test_responses_add_what_was_asked_and_answered(client: openai.OpenAI, service: ScriptedService) -> None:
    made = client.conversations.create(metadata={"topic": "a"}, items=[{"role": "user", "content": "I am Ann."}])
    first = ask(client, "Hi", conversation=made.id)
    assert first.conversation is not None and first.conversation.id == made.id
    ask(client, "And?", conversation={"id": made.id}, stream=False)
    spoken = ["I am Ann.", "Hi", "Hello there.", "And?", "Hello there."]
    assert [message["content"] for message in service.requests[1].prompt.messages] == spoken[:-1]
    assert [text for _, text in said(client, made.id)] == spoken
    assert [role for role, _ in said(client, made.id)] == ["user", "user", "assistant", "user", "assistant"]


def test_an_item_that_comes_again_is_listed_once_more_under_an_id_of_its_own(client: openai.OpenAI) -> None:
    first: Any = {"type": "message", "id": "msg_1", "role": "user", "content": "a"}
    made = client.conversations.create(items=[first, first])
    client.conversations.items.create(made.id, items=[first])
    client.responses.create(model="scripted", input=[first], conversation=made.id)
    listed = list(itertools.islice(client.conversations.items.list(made.id, limit=1, order="asc"), 9))
    assert len(listed) == len({item.id for item in listed}) == 5
    assert [text for _, text in said(client, made.id)] == ["a"] * 4 + ["Hello there."]


def test_an_item_that_is_gone_takes_no_other_with_it_that_has_its_number() -> None:
    store, now = EventStore(None), time.time()
    store.conversations.create(ResponseRecord("conv_1", "key", now, None, b"{}"), [b'{"id":"a"}', b'{"id":"b"}'])
    last = store.read("conv_1", -1, -1)[-1]
    for _ in range(2):
        store.conversations.remove("conv_1", last.sequence, last.data, now)
        store.conversations.append("conv_1", [b'{"id":"c"}'], now)
    assert [row.data for row in store.read("conv_1", -1, -1)] == [b'{"id":"a"}', b'{"id":"c"}', b'{"id":"c"}']
    store.close()


def test_a_stream_adds_too_and_its_turn_is_there_when_it_has_ended(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    *_, last = client.responses.create(model="scripted", input="Hi", conversation=made.id, stream=True)
    assert last.type == "response.completed"
    assert said(client, made.id) == [("user", "Hi"), ("assistant", "Hello there.")]


def test_a_key_lists_its_own_by_their_last_change() -> None:
    with serving(ScriptedService(), {"ann": None, "bert": None}) as url:
        ann, bert = (httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) for key in ("ann", "bert"))
        with ann, bert:
            made = [ann.post("/v1/conversations", json={"metadata": {"n": str(n)}}).json()["id"] for n in range(3)]
            item = {"type": "message", "role": "user", "content": "Hi"}
            ann.post(f"/v1/conversations/{made[0]}/items", json={"items": [item]})
            first = ann.get("/v1/conversations?limit=2").json()
            rest = ann.get(f"/v1/conversations?limit=2&after={first['last_id']}").json()
            assert [one["id"] for one in (*first["data"], *rest["data"])] == [made[0], made[2], made[1]]
            assert first["has_more"] and not rest["has_more"]
            assert first["data"][0]["metadata"] == {"n": "0"}
            assert first["data"][0]["paceline"]["updated_at"] > first["data"][1]["paceline"]["updated_at"]
            assert bert.get("/v1/conversations").json()["data"] == []
            asked = {"model": "scripted", "input": "Hi"}
            assert bert.post("/v1/responses", json=asked | {"conversation": made[0]}).status_code == 404
            assert ann.post("/v1/responses", json=asked).status_code == 200
            assert len(ann.get("/v1/conversations").json()["data"]) == 3, "responses lie in the same log"


def test_pages_of_the_list_are_slices_of_it_whatever_the_cursors(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        times = [5.0, 3.0, 5.0, 1.0, 4.0, 5.0, 2.0]  # two that changed at once have their ids' order
        made = sorted((created, f"conv_{number}") for number, created in enumerate(times))
        for created, conversation in made:
            store.conversations.create(ResponseRecord(conversation, "ann", created, None, b"{}"), [])
        store.conversations.create(ResponseRecord("conv_9", "bert", 3.0, None, b"{}"), [])
        ids = [conversation for created, conversation in made if created >= 2.0]
        cursors = [None, *ids]
        for order, after, before, limit in itertools.product(ORDERS, cursors, cursors, (1, 3, 9)):
            listed = ids if order == "asc" else ids[::-1]
            wanted = listed[0 if after is None else listed.index(after) + 1 :]
            asked = Paging(limit, order, after, before)
            if before is not None and before not in wanted:
                with pytest.raises(RequestError, match=before):
                    store.conversations.page("ann", 2.0, asked)
                continue
            wanted = wanted[: None if before is None else wanted.index(before)]
            records, more = store.conversations.page("ann", 2.0, asked)
            assert ([record.id for record in records], more) == (wanted[:limit], len(wanted) > limit), asked
        for cursor in ("conv_3", "conv_9"):  # too old, another's
            with pytest.raises(RequestError, match=cursor) as refused:
                store.conversations.page("ann", 2.0, Paging(after=cursor))
            assert refused.value.param == "after"


def test_a_page_of_the_list_reads_what_it_shows(tmp_path: Path) -> None:
    """All events of stored answers are written by the thread that reads it."""
    steps: list[int] = []
    with closing(EventStore(tmp_path)) as store:
        connection = store._connection
        for number in range(3000):
            store.conversations.create(ResponseRecord(f"conv_{number}", "ann", float(number), None, b"{}"), [])
            if number in (30, 2999):
                for asked in (Paging(1), Paging(1, "asc", f"conv_{number // 2}"), Paging(1, before="conv_9")):
                    steps.append(0)
                    connection.set_progress_handler(lambda: steps.append(steps.pop() + 1), 1)
                    store.conversations.page("ann", 0.0, asked)
                    connection.set_progress_handler(None, 0)
    assert max(steps) < 1000, "instructions of SQLite"


def test_an_answer_that_fails_adds_nothing(client: openai.OpenAI, service: ScriptedService) -> None:
    made = client.conversations.create()
    service.script = Script([PacelineError("It cannot go on.")])
    with pytest.raises(openai.InternalServerError):
        ask(client, "Hi", conversation=made.id)
    assert said(client, made.id) == []


def test_deleting_a_response_leaves_the_conversation(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    client.responses.delete(ask(client, "Hi", conversation=made.id).id)
    assert len(said(client, made.id)) == 2


def test_no_passage_of_a_document_is_kept(client: openai.OpenAI, service: ScriptedService) -> None:
    service.script = Script(answering("Yes.", citations=(Citation("cloud", "a.md", "A secret passage.", 0.5),)))
    made = client.conversations.create()
    ask(client, "Hi", conversation=made.id, tools=[{"type": "file_search", "vector_store_ids": []}])
    assert "secret" not in str(client.conversations.items.list(made.id).model_dump())


def test_metadata_is_replaced_and_everything_is_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "a"}, items=[{"role": "user", "content": "Hi"}])
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "b"})
    assert changed.metadata == {"topic": "b"} and changed.created_at == made.created_at
    assert client.conversations.delete(made.id).deleted
    for again in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            again(made.id)


def test_items_are_added_fetched_listed_in_pages_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    texts = [f"line {number}" for number in range(7)]
    added = client.conversations.items.create(made.id, items=[{"role": "user", "content": text} for text in texts])
    ids = [str(item.id) for item in added.data]
    assert [item.id for item in client.conversations.items.list(made.id, limit=3, order="asc")] == ids
    page = client.conversations.items.list(made.id, limit=3)
    assert [item.id for item in page.data] == ids[:-4:-1] and page.has_more
    fetched: Any = client.conversations.items.retrieve(ids[2], conversation_id=made.id)
    assert fetched.content[0].text == "line 2"
    assert client.conversations.items.delete(ids[2], conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(ids[2], conversation_id=made.id)
    assert len(said(client, made.id)) == 6


def test_what_cannot_be_done_is_refused_by_name(http: httpx.Client) -> None:
    cases: list[tuple[str, dict[str, object], int, str]] = [
        ("/v1/responses", {"model": "scripted", "input": "a", "conversation": "conv_none"}, 404, "conversation"),
        ("/v1/conversations", {"metadata": {"a": 1}}, 400, "metadata.a"),
        ("/v1/conversations", {"items": [{"role": "user", "content": "a"}] * 21}, 400, "items"),
        ("/v1/conversations", {"items": [{"role": "user"}]}, 400, "items[0].content"),
        ("/v1/conversations/conv_none", {"metadata": {}}, 404, "conversation"),
        ("/v1/conversations/conv_none/items", {"items": [{"role": "user", "content": "a"}]}, 404, "conversation"),
    ]
    for path, body, status, param in cases:
        assert fault(http.post(path, json=body), status)["param"] == param


def test_a_conversation_is_no_response_and_a_response_no_conversation(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    made = client.conversations.create()
    response = ask(client, "Hi", conversation=made.id)
    for path in (f"/v1/responses/{made.id}", f"/v1/conversations/{response.id}"):
        fault(http.get(path), 404)
        fault(http.delete(path), 404)
    continued = {"model": "scripted", "input": "a", "previous_response_id": made.id}
    assert fault(http.post("/v1/responses", json=continued))["code"] == "previous_response_not_found"


ANN = Identity(key="ann")


async def make(log: EventLog, conversation: str, *items: str) -> None:
    record = ResponseRecord(conversation, ANN.key, time.time(), None, json.dumps({"id": conversation}).encode())
    await log.change(lambda: log.conversations.create(record, [json.dumps(item).encode() for item in items]))


async def add(log: EventLog, conversation: str, item: str) -> None:
    await log.change(lambda: log.conversations.append(conversation, [json.dumps(item).encode()], time.time()))


async def test_a_conversation_outlives_the_process_and_keeps_its_latest_items(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    await make(log, "conv_a")
    for number in range(6):
        await add(log, "conv_a", f"{number}" * (MAX_CONVERSATION // 4))
    log.close()
    log = EventLog(tmp_path)
    kept = await items_of("conv_a", log, ANN)
    assert [str(each)[0] for each in kept.values()] == ["3", "4", "5"]
    log.close()


async def test_conversations_count_in_the_room_of_responses_and_the_oldest_go(tmp_path: Path) -> None:
    log = EventLog(tmp_path, Retention(max_bytes=25_000))
    for number in range(6):
        await make(log, f"conv_{number}", "x" * 10_000)
    assert [number for number in range(6) if await log.find(f"conv_{number}") is not None] == [4, 5]
    log.close()


async def test_one_that_did_not_change_for_too_long_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path, Retention(max_age=1000.0))

    async def listed() -> list[str]:
        found = json.loads((await list_conversations(PageQuery(), log, ANN)).body)
        return [each["id"] for each in found["data"]]

    now = time.time()
    await make(log, "conv_a")
    monkeypatch.setattr(time, "time", lambda: now + 800)
    await add(log, "conv_a", "a")
    monkeypatch.setattr(time, "time", lambda: now + 1600)
    await items_of("conv_a", log, ANN)
    assert await listed() == ["conv_a"]
    monkeypatch.setattr(time, "time", lambda: now + 2000)
    with pytest.raises(RequestError, match="not found"):
        await items_of("conv_a", log, ANN)
    assert await listed() == []
    log.close()
