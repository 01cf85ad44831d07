"""`/v1/conversations`: what was said in several responses, kept under one id in the log of responses.

A conversation belongs to the key that made it; another key gets 404. Items are those of `/v1/responses`, which adds to
them when a response has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field
from starlette.responses import Response

from paceline.api.generation.attachments import ConversationRoute
from paceline.api.generation.schema import Metadata
from paceline.api.http.body import Json, PageQuery, Schema, answer, deleted, encode_json, listing, page_of
from paceline.api.http.routing import Caller, ServiceDep, of_app
from paceline.api.openapi import answered, keyed_router
from paceline.api.responses.log import EventLog
from paceline.api.responses.request import InputItem, input_items, new_id
from paceline.api.responses.store import ResponseRecord
from paceline.errors import RequestError

PREFIX = "conv_"  # of ids: responses have another
MAX_ITEMS = 20  # in one request, as at OpenAI

Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]


class ConversationRequest(Schema):
    items: Items = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class MetadataRequest(Schema):
    metadata: Metadata


class ItemsRequest(Schema):
    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]


class Conversations:
    """Conversations over the log of responses. Used on the event loop.

    Every method that names one raises RequestError (404) when there is none, or it is another owner's.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log

    async def create(
        self, conversation: str, owner: str, metadata: Mapping[str, str], items: Sequence[Json]
    ) -> dict[str, Any]:
        """The JSON object of a new one, as the next two give it."""
        now = time.time()
        made = {"id": conversation, "object": "conversation", "created_at": int(now), "metadata": dict(metadata)}
        record = ResponseRecord(conversation, owner, now, None, encode_json(made))
        encoded = [encode_json(item) for item in items]
        await self._log.change(lambda: self._log.conversations.create(record, encoded))
        return made

    async def find(self, conversation: str, owner: str) -> dict[str, Any]:
        record = await self._log.find(conversation) if conversation.startswith(PREFIX) else None
        if record is None or record.owner != owner:
            raise RequestError(
                f"Conversation with id {conversation[:64]!r} not found.", status=404, param="conversation"
            )
        found: dict[str, Any] = json.loads(record.request)
        return found

    async def page(self, owner: str, asked: PageQuery) -> tuple[list[dict[str, Any]], bool]:
        """A page of an owner's by their last change, and whether there are more. Raises RequestError (400)."""
        rows, since = self._log.conversations, self._log.oldest()
        ids = await self._log.query(lambda: rows.ids(PREFIX, owner, since))
        shown, more = page_of([{"id": each} for each in ids], asked)
        records = await self._log.query(lambda: rows.find_all([str(each["id"]) for each in shown]))
        return [json.loads(one.request) | {"paceline": {"updated_at": one.created}} for one in records], more

    async def update(self, conversation: str, owner: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        after = await self.find(conversation, owner) | {"metadata": dict(metadata)}
        encoded = encode_json(after)
        await self._log.change(lambda: self._log.conversations.describe(conversation, encoded, time.time()))
        return after

    async def delete(self, conversation: str, owner: str) -> None:
        await self.find(conversation, owner)
        await self._log.delete(conversation)

    async def items(self, conversation: str, owner: str) -> list[Json]:
        """Oldest first."""
        return [item for _, item in await self._numbered(conversation, owner)]

    async def item(self, conversation: str, owner: str, item: str) -> tuple[int, Json]:
        """An item after its number."""
        for number, found in await self._numbered(conversation, owner):
            if found["id"] == item:
                return number, found
        raise RequestError(f"Item with id {item[:64]!r} not found in this conversation.", status=404, param="item_id")

    async def add(self, conversation: str, owner: str, items: Sequence[Json]) -> None:
        await self.find(conversation, owner)
        encoded = [encode_json(item) for item in items]
        await self._log.change(lambda: self._log.conversations.append(conversation, encoded, time.time()))

    async def remove(self, conversation: str, owner: str, item: str) -> dict[str, Any]:
        number, _ = await self.item(conversation, owner, item)
        await self._log.change(lambda: self._log.conversations.remove(conversation, number, time.time()))
        return await self.find(conversation, owner)

    async def _numbered(self, conversation: str, owner: str) -> list[tuple[int, Json]]:
        await self.find(conversation, owner)
        rows = await self._log.all(conversation)
        return await asyncio.to_thread(lambda: [(row.sequence, json.loads(row.data)) for row in rows])


Kept = Annotated[Conversations, of_app("conversations")]
_SHAPE = answered("conversations.Conversation")
_ITEMS = answered("SyncCursorPage[conversations.ConversationItem]")

router = keyed_router("conversations", "responses", prefix="/v1/conversations", route=ConversationRoute)


@router.post("", responses=_SHAPE)
async def create_conversation(asked: ConversationRequest, kept: Kept, caller: Caller) -> Response:
    """Begin a conversation."""
    items = input_items(asked.items, field="items")
    return answer(await kept.create(new_id("conv"), caller.key, asked.metadata, items))


@router.get("", responses=answered("SyncCursorPage[conversations.Conversation]"))
async def list_conversations(query: Annotated[PageQuery, Query()], kept: Kept, caller: Caller) -> Response:
    """List this key's conversations by their last change. OpenAI has no such list."""
    return listing(*await kept.page(caller.key, query))


@router.get("/{conversation_id}", responses=_SHAPE)
async def show_conversation(conversation_id: str, kept: Kept, caller: Caller) -> Response:
    """Fetch a conversation without its items."""
    return answer(await kept.find(conversation_id, caller.key))


@router.post("/{conversation_id}", responses=_SHAPE)
async def update_conversation(conversation_id: str, asked: MetadataRequest, kept: Kept, caller: Caller) -> Response:
    """Replace a conversation's metadata."""
    return answer(await kept.update(conversation_id, caller.key, asked.metadata))


@router.delete("/{conversation_id}", responses=answered("conversations.ConversationDeletedResource"))
async def delete_conversation(conversation_id: str, kept: Kept, caller: Caller, service: ServiceDep) -> Response:
    """Delete a conversation and its items, and what answers of its key have taught look-up tables."""
    await kept.delete(conversation_id, caller.key)
    await service.forget_answers(caller.key)
    return deleted(conversation_id, "conversation.deleted")


@router.get("/{conversation_id}/items", responses=_ITEMS)
async def list_items(
    conversation_id: str, query: Annotated[PageQuery, Query()], kept: Kept, caller: Caller
) -> Response:
    """List what was said in a conversation."""
    return listing(*page_of(await kept.items(conversation_id, caller.key), query))


@router.post("/{conversation_id}/items", responses=_ITEMS)
async def add_items(conversation_id: str, asked: ItemsRequest, kept: Kept, caller: Caller) -> Response:
    """Add items to a conversation."""
    items = input_items(asked.items, field="items")
    await kept.add(conversation_id, caller.key, items)
    return listing(items, more=False)


@router.get("/{conversation_id}/items/{item_id}", responses=answered("conversations.ConversationItem"))
async def show_item(conversation_id: str, item_id: str, kept: Kept, caller: Caller) -> Response:
    """Fetch an item of a conversation."""
    _, found = await kept.item(conversation_id, caller.key, item_id)
    return answer(found)


@router.delete("/{conversation_id}/items/{item_id}", responses=_SHAPE)
async def delete_item(conversation_id: str, item_id: str, kept: Kept, caller: Caller, service: ServiceDep) -> Response:
    """Delete an item of a conversation, and what answers of its key have taught look-up tables."""
    left = await kept.remove(conversation_id, caller.key, item_id)
    await service.forget_answers(caller.key)
    return answer(left)
