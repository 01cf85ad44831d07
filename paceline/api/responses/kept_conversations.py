"""Conversations as `/v1/conversations` shows them, over the log of responses. Used on the event loop.

A conversation belongs to the key that made it; another key gets 404. Items are those of `/v1/responses`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from paceline.api.http.errors import encode_json
from paceline.api.responses.conversation_rows import PREFIX
from paceline.api.responses.log import EventLog
from paceline.errors import RequestError

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    created_at: int  # s since 1970
    metadata: Mapping[str, str]

    def body(self) -> Json:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
        }

    def head(self) -> bytes:
        return encode_json({"created_at": self.created_at, "metadata": dict(self.metadata)})


class Conversations:
    """Every method that names one raises RequestError (404) when there is none, or it is another owner's."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._rows = log.conversation_rows

    async def create(
        self, conversation: str, owner: str, metadata: Mapping[str, str], items: Sequence[Json]
    ) -> Conversation:
        now = time.time()
        made = Conversation(conversation, int(now), metadata)
        encoded = [encode_json(item) for item in items]
        await self._log.change(lambda: self._rows.create(conversation, owner, now, made.head(), encoded))
        return made

    async def find(self, conversation: str, owner: str) -> Conversation:
        since = time.time() - self._log.max_age
        head = None
        if conversation.startswith(PREFIX):
            head = await self._log.query(lambda: self._rows.find(conversation, owner, since))
        if head is None:
            raise _missing(conversation)
        return Conversation(conversation, **json.loads(head))

    async def update(self, conversation: str, owner: str, metadata: Mapping[str, str]) -> Conversation:
        before = await self.find(conversation, owner)
        after = Conversation(conversation, before.created_at, metadata)
        await self._log.change(lambda: self._rows.replace_head(conversation, after.head(), time.time()))
        return after

    async def delete(self, conversation: str, owner: str) -> None:
        await self.find(conversation, owner)
        await self._log.delete(conversation)

    async def items(self, conversation: str, owner: str) -> list[Json]:
        """Oldest first."""
        return [item for _, item in await self._numbered(conversation, owner)]

    async def add(self, conversation: str, owner: str, items: Sequence[Json]) -> None:
        await self.find(conversation, owner)
        encoded = [encode_json(item) for item in items]
        await self._log.change(lambda: self._rows.append(conversation, encoded, time.time()))

    async def item(self, conversation: str, owner: str, item: str) -> Json:
        return (await self._numbered_item(conversation, owner, item))[1]

    async def remove(self, conversation: str, owner: str, item: str) -> Conversation:
        number, _ = await self._numbered_item(conversation, owner, item)
        await self._log.change(lambda: self._rows.remove(conversation, number, time.time()))
        return await self.find(conversation, owner)

    async def _numbered(self, conversation: str, owner: str) -> list[tuple[int, Json]]:
        await self.find(conversation, owner)
        rows = await self._log.query(lambda: self._rows.items(conversation))
        return await asyncio.to_thread(lambda: [(number, cast("Json", json.loads(data))) for number, data in rows])

    async def _numbered_item(self, conversation: str, owner: str, item: str) -> tuple[int, Json]:
        for number, found in await self._numbered(conversation, owner):
            if found["id"] == item:
                return number, found
        raise RequestError(f"Item with id {item[:64]!r} not found in this conversation.", status=404, param="item_id")


def _missing(conversation: str) -> RequestError:
    return RequestError(f"Conversation with id {conversation[:64]!r} not found.", status=404, param="conversation")
