"""`/v1/conversations`: what was said in several responses, kept under one id."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.generation.attachments import read_conversation
from paceline.api.generation.schema import MAX_METADATA
from paceline.api.http.auth import Identity
from paceline.api.http.body import Schema, parse
from paceline.api.http.pagination import PageQuery, answer, listing, page_of, parse_query
from paceline.api.responses.endpoint import new_id
from paceline.api.responses.kept_conversations import Conversations
from paceline.api.responses.request import InputItem, MetadataKey, MetadataValue, input_items
from paceline.api.routes import Route

# `/v1/conversations` and their items: create, fetch, change, delete. Responses add to them (`responses/runs.py`).


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
        items = input_items(asked.items, new_id, field="items")
        made = await self._conversations.create(new_id("conv"), _owner(request), asked.metadata, items)
        return answer(made.body())

    async def retrieve(self, request: Request) -> Response:
        return answer((await self._conversations.find(*_named(request))).body())

    async def update(self, request: Request) -> Response:
        asked = parse(MetadataRequest, await _body(request))
        return answer((await self._conversations.update(*_named(request), asked.metadata)).body())

    async def delete(self, request: Request) -> Response:
        conversation, owner = _named(request)
        await self._conversations.delete(conversation, owner)
        return answer(DeletedConversation(id=conversation).model_dump())

    async def list_items(self, request: Request) -> Response:
        asked = parse_query(PageQuery, request.query_params)
        return listing(*page_of(await self._conversations.items(*_named(request)), asked))

    async def add_items(self, request: Request) -> Response:
        asked = parse(ItemsRequest, await _body(request))
        items = input_items(asked.items, new_id, field="items")
        await self._conversations.add(*_named(request), items)
        return listing(items, more=False)

    async def retrieve_item(self, request: Request) -> Response:
        return answer(await self._conversations.item(*_named(request), request.path_params["item_id"]))

    async def delete_item(self, request: Request) -> Response:
        item = request.path_params["item_id"]
        return answer((await self._conversations.remove(*_named(request), item)).body())


def _owner(request: Request) -> str:
    identity: Identity = request.state.identity
    return identity.key


def _named(request: Request) -> tuple[str, str]:
    """(id in the path, owner)."""
    return request.path_params["conversation_id"], _owner(request)


async def _body(request: Request) -> dict[str, object]:
    return await read_conversation(request)
