"""`/v1/conversations`: what was said in several responses, kept under one id in the log of responses.

A conversation belongs to the key that made it; another key gets 404. Items are those of `/v1/responses`, which adds to
them when a response has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import Field
from starlette.responses import Response

from paceline.api.generation.attachments import ConversationRoute
from paceline.api.generation.schema import Metadata
from paceline.api.http.body import Json, PageQuery, Schema, answer, deleted, encode_json, listing, page_of
from paceline.api.http.routing import Caller, ServiceDep, of_app
from paceline.api.openapi import answered, keyed_router
from paceline.api.responses.log import EventLog
from paceline.api.responses.request import InputItem, input_items, new_id, set_apart
from paceline.api.responses.store import CONVERSATION_PREFIX, ResponseRecord
from paceline.errors import RequestError

MAX_ITEMS = 20  # in one request, as at OpenAI


class ConversationRequest(Schema):
    items: Annotated[list[InputItem], Field(max_length=MAX_ITEMS)] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class MetadataRequest(Schema):
    metadata: Metadata


class ItemsRequest(Schema):
    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]


LogDep = Annotated[EventLog, of_app("log")]


async def _found(conversation_id: str, log: LogDep, caller: Caller) -> dict[str, Any]:
    """Raises RequestError (404) when there is none, or it is another owner's."""
    record = await log.find(conversation_id) if conversation_id.startswith(CONVERSATION_PREFIX) else None
    if record is None or record.owner != caller.key:
        raise RequestError(
            f"Conversation with id {conversation_id[:64]!r} not found.", status=404, param="conversation"
        )
    found: dict[str, Any] = json.loads(record.request)
    return found


async def items_of(conversation_id: str, log: LogDep, caller: Caller) -> dict[int, Json]:
    """Items by their numbers, oldest first. Raises RequestError (404) as for the conversation."""
    await _found(conversation_id, log, caller)
    rows = await log.all(conversation_id)
    return await asyncio.to_thread(lambda: {row.sequence: json.loads(row.data) for row in rows})


async def _item(conversation_id: str, item_id: str, log: LogDep, caller: Caller) -> tuple[int, Json]:
    """An item after its number."""
    for number, found in (await items_of(conversation_id, log, caller)).items():
        if found["id"] == item_id:
            return number, found
    raise RequestError(f"Item with id {item_id[:64]!r} not found in this conversation.", status=404, param="item_id")


Found = Annotated[dict[str, Any], Depends(_found)]
Items = Annotated[dict[int, Json], Depends(items_of)]
Item = Annotated[tuple[int, Json], Depends(_item)]
_SHAPE = answered("conversations.Conversation")
_ITEMS = answered("SyncCursorPage[conversations.ConversationItem]")

router = keyed_router("conversations", "responses", prefix="/v1/conversations", route=ConversationRoute)


@router.post("", responses=_SHAPE)
async def create_conversation(asked: ConversationRequest, log: LogDep, caller: Caller) -> Response:
    """Begin a conversation."""
    items = [encode_json(item) for item in input_items(asked.items, field="items")]
    conversation, now = new_id("conv"), time.time()
    made = {"id": conversation, "object": "conversation", "created_at": int(now), "metadata": asked.metadata}
    record = ResponseRecord(conversation, caller.key, now, None, encode_json(made))
    await log.change(lambda: log.conversations.create(record, items))
    return answer(made)


@router.get("", responses=answered("SyncCursorPage[conversations.Conversation]"))
async def list_conversations(query: Annotated[PageQuery, Query()], log: LogDep, caller: Caller) -> Response:
    """List this key's conversations by their last change. OpenAI has no such list."""
    records, more = await log.query(lambda: log.conversations.page(caller.key, log.oldest(), query.paging))
    return listing([json.loads(one.request) | {"paceline": {"updated_at": one.created}} for one in records], more)


@router.get("/{conversation_id}", responses=_SHAPE)
async def show_conversation(found: Found) -> Response:
    """Fetch a conversation without its items."""
    return answer(found)


@router.post("/{conversation_id}", responses=_SHAPE)
async def update_conversation(conversation_id: str, asked: MetadataRequest, log: LogDep, found: Found) -> Response:
    """Replace a conversation's metadata."""
    after = found | {"metadata": asked.metadata}
    await log.change(lambda: log.conversations.describe(conversation_id, encode_json(after), time.time()))
    return answer(after)


@router.delete("/{conversation_id}", responses=answered("conversations.ConversationDeletedResource"))
async def delete_conversation(found: Found, log: LogDep, caller: Caller, service: ServiceDep) -> Response:
    """Delete a conversation and its items, and what answers of its key have taught look-up tables."""
    await log.delete(found["id"])
    await service.forget_answers(caller.key)
    return deleted(found["id"], "conversation.deleted")


@router.get("/{conversation_id}/items", responses=_ITEMS)
async def list_items(items: Items, query: Annotated[PageQuery, Query()]) -> Response:
    """List what was said in a conversation."""
    return listing(*page_of([*items.values()], query))


@router.post("/{conversation_id}/items", responses=_ITEMS)
async def add_items(conversation_id: str, asked: ItemsRequest, earlier: Items, log: LogDep) -> Response:
    """Add items to a conversation."""
    items = input_items(asked.items, field="items")
    set_apart(items, earlier.values())
    encoded = [encode_json(item) for item in items]
    await log.change(lambda: log.conversations.append(conversation_id, encoded, time.time()))
    return listing(items, more=False)


@router.get("/{conversation_id}/items/{item_id}", responses=answered("conversations.ConversationItem"))
async def show_item(item: Item) -> Response:
    """Fetch an item of a conversation."""
    return answer(item[1])


@router.delete("/{conversation_id}/items/{item_id}", responses=_SHAPE)
async def delete_item(item: Item, found: Found, log: LogDep, caller: Caller, service: ServiceDep) -> Response:
    """Delete an item of a conversation, and what answers of its key have taught look-up tables."""
    await log.change(lambda: log.conversations.remove(found["id"], item[0], encode_json(item[1]), time.time()))
    await service.forget_answers(caller.key)
    return answer(found)
