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

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.generation.attachments import read_conversation
from paceline.api.generation.schema import MAX_METADATA
from paceline.api.http.auth import Identity
from paceline.api.http.body import Schema, parse
from paceline.api.http.errors import encode_json
from paceline.api.http.pagination import PageQuery, answer, listing, page_of, parse_query
from paceline.api.responses.log import EventLog
from paceline.api.responses.request import InputItem, Json, MetadataKey, MetadataValue, input_items, new_id
from paceline.api.responses.store import ResponseRecord
from paceline.api.routes import Route
from paceline.errors import RequestError

PREFIX = "conv_"  # of ids: responses have another
MAX_ITEMS = 20  # in one request, as at OpenAI

Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)]
Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]


class ConversationRequest(Schema):
    items: Items = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class MetadataRequest(Schema):
    metadata: Metadata


class ItemsRequest(Schema):
    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]


class DeletedConversation(BaseModel):
    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


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


class ConversationsEndpoint:
    """The routes, and the conversations they show."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def routes(self) -> tuple[Route, ...]:
        one = "/v1/conversations/{conversation_id}"
        shape = "conversations.Conversation"
        items = "SyncCursorPage[conversations.ConversationItem]"
        return (
            Route(
                method="POST",
                path="/v1/conversations",
                endpoint=self.create,
                summary="Begin a conversation.",
                scope="responses",
                request=ConversationRequest,
                response=shape,
            ),
            Route(
                method="GET",
                path=one,
                endpoint=self.retrieve,
                summary="Fetch a conversation without its items.",
                scope="responses",
                response=shape,
            ),
            Route(
                method="POST",
                path=one,
                endpoint=self.update,
                summary="Replace a conversation's metadata.",
                scope="responses",
                request=MetadataRequest,
                response=shape,
            ),
            Route(
                method="DELETE",
                path=one,
                endpoint=self.delete,
                summary="Delete a conversation and its items.",
                scope="responses",
                response=DeletedConversation,
            ),
            Route(
                method="GET",
                path=one + "/items",
                endpoint=self.list_items,
                summary="List what was said in a conversation.",
                scope="responses",
                query=PageQuery,
                response=items,
            ),
            Route(
                method="POST",
                path=one + "/items",
                endpoint=self.add_items,
                summary="Add items to a conversation.",
                scope="responses",
                request=ItemsRequest,
                response=items,
            ),
            Route(
                method="GET",
                path=one + "/items/{item_id}",
                endpoint=self.retrieve_item,
                summary="Fetch an item of a conversation.",
                scope="responses",
                response="conversations.ConversationItem",
            ),
            Route(
                method="DELETE",
                path=one + "/items/{item_id}",
                endpoint=self.delete_item,
                summary="Delete an item of a conversation.",
                scope="responses",
                response=shape,
            ),
        )

    async def create(self, request: Request) -> Response:
        asked = parse(ConversationRequest, await _body(request))
        items = input_items(asked.items, field="items")
        made = await self._conversations.create(new_id("conv"), _owner(request), asked.metadata, items)
        return answer(made)

    async def retrieve(self, request: Request) -> Response:
        return answer(await self._conversations.find(*_named(request)))

    async def update(self, request: Request) -> Response:
        asked = parse(MetadataRequest, await _body(request))
        return answer(await self._conversations.update(*_named(request), asked.metadata))

    async def delete(self, request: Request) -> Response:
        conversation, owner = _named(request)
        await self._conversations.delete(conversation, owner)
        return answer(DeletedConversation(id=conversation).model_dump())

    async def list_items(self, request: Request) -> Response:
        asked = parse_query(PageQuery, request.query_params)
        return listing(*page_of(await self._conversations.items(*_named(request)), asked))

    async def add_items(self, request: Request) -> Response:
        asked = parse(ItemsRequest, await _body(request))
        items = input_items(asked.items, field="items")
        await self._conversations.add(*_named(request), items)
        return listing(items, more=False)

    async def retrieve_item(self, request: Request) -> Response:
        _, found = await self._conversations.item(*_named(request), request.path_params["item_id"])
        return answer(found)

    async def delete_item(self, request: Request) -> Response:
        return answer(await self._conversations.remove(*_named(request), request.path_params["item_id"]))


def _owner(request: Request) -> str:
    identity: Identity = request.state.identity
    return identity.key


def _named(request: Request) -> tuple[str, str]:
    """(id in the path, owner)."""
    return request.path_params["conversation_id"], _owner(request)


async def _body(request: Request) -> dict[str, object]:
    return await read_conversation(request)
