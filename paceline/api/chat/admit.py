"""Admission of a chat's generations, for every surface whose requests become chat bodies."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from paceline.api.chat.request import ChatCall
from paceline.api.generation.attachments import read_conversation
from paceline.api.generation.fan_in import prepare_all
from paceline.api.http.body import while_connected
from paceline.api.vector_stores.search import select_stores
from paceline.runtime.service import Generation, Service


async def read_chat(request: Request, service: Service) -> Mapping[str, object]:
    """The body, unread where the key's answers have no room, with its files as text. Raises RequestError."""
    await service.wait_for_room(request.state.identity.key)
    return await read_conversation(request)


async def admit_chat(request: Request, call: ChatCall, service: Service) -> list[Generation]:
    """All of the call's generations, or none, by `prepare_all`. Raises RequestError, and ClientGoneError when the
    client leaves."""
    request.state.model = call.requests[0].model  # for the log
    requests = await select_stores(call.requests, service, request.state.identity, call.vector_stores)
    return await while_connected(request.receive, prepare_all(service, requests))
