"""`/mcp`: this side's documents as tools for other programs, over the Model Context Protocol (its own SDK).

Two tools, by the names and shapes that research agents look for: `search` and `fetch`. They read what this side has,
for the key of the request, and send the other side nothing. Each message is a POST of its own, without a session or a
stream; `paceline mcp` carries them here from standard input. The SDK, which takes seconds to load, is loaded by the
first of them.
"""

from __future__ import annotations

import asyncio
import importlib
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import httpx
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from paceline import __version__
from paceline.api.http.body import Schema, encode_json, while_connected
from paceline.api.http.routing import PATH as PASSAGE
from paceline.api.http.routing import Caller, ServiceDep, SettingsDep
from paceline.api.openapi import Responses, answered, keyed_router
from paceline.api.search import MAX_QUERY, MAX_RESULTS, LibraryDep
from paceline.errors import RequestError
from paceline.rag.records import DEFAULT_COLLECTION
from paceline.rag.store.library import Library
from paceline.runtime.service import Service

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

INSTRUCTIONS = {
    "cloud": "Searches the documents of a Paceline server.",
    "device": "Searches private documents on a person's own machine. What is found is for that person alone.",
}


class RpcMessage(Schema):
    """A message of JSON-RPC, as the protocol has them."""

    model_config = ConfigDict(extra="allow")

    jsonrpc: Literal["2.0"]
    method: Annotated[str, Field(max_length=256)]
    id: int | str | None = None
    params: dict[str, Any] | None = None


class RpcAnswer(BaseModel):
    """Its answer."""

    jsonrpc: str
    id: int | str | None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class RpcFault(BaseModel):
    """The reason, with a number of JSON-RPC or a name of this server."""

    message: str


class RpcRefusal(BaseModel):
    """Refusal of a message, by the protocol or by this server."""

    error: RpcFault


class FoundPassage(BaseModel):
    """One passage. `id` is for `fetch`; `text` may be cut where it is shown."""

    id: str
    title: str
    text: str
    url: str
    score: float


class Findings(BaseModel):
    """Passages, best first."""

    results: list[FoundPassage]


class Fetched(BaseModel):
    """A passage with what stands before and after it."""

    id: str
    title: str
    text: str
    url: str
    metadata: dict[str, str]


router = keyed_router("mcp", "vector_stores", error=RpcRefusal)
_ACCEPTED: Responses = {202: {"description": "A notification, which has no answer."}}


@router.post("/mcp", responses=answered(RpcAnswer) | _ACCEPTED)
async def answer_message(
    asked: RpcMessage, request: Request, library: LibraryDep, service: ServiceDep, caller: Caller, settings: SettingsDep
) -> Response:
    """Answer a message of a client of the Model Context Protocol."""
    try:
        await asyncio.to_thread(importlib.import_module, "mcp.server.mcpserver")
    except ModuleNotFoundError:
        raise RequestError(
            "Tools need the protocol's SDK here: run `pip install 'paceline[mcp]'`, and start this program again.",
            status=404,
            code="mcp_not_installed",
        ) from None
    server = _tools(service, library, caller.key, settings.addresses.of(request).public)
    body = encode_json(asked.model_dump(exclude_unset=True))
    return await while_connected(request.receive, _exchanged(server, request, body))


def _tools(service: Service, library: Library, owner: str, address: str) -> MCPServer[Any]:
    """The tools for one key. address: of this side, for people."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations

    def url_of(chunk_id: int | None) -> str:
        return f"{address.rstrip('/')}{PASSAGE}?id={chunk_id}"

    async def search(
        query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY, description="a question, or words to find")],
        limit: Annotated[int, Field(ge=1, le=MAX_RESULTS, description="passages at most")] = 8,
        vector_stores: Annotated[
            list[str] | None, Field(max_length=8, description="ids of stores; default: the side's own documents")
        ] = None,
    ) -> Findings:
        """Search the documents. Gives passages, best first; fetch one by its id to read what stands around it."""
        try:
            found = partial(library.search, owner, vector_stores or [DEFAULT_COLLECTION], [query], limit)
            hits = await service.find(found, owner)
        except RequestError as error:
            raise ToolError(str(error)) from None
        return Findings(
            results=[
                FoundPassage(
                    id=str(hit.passage.chunk_id),
                    title=", ".join(filter(None, (hit.passage.document, hit.passage.place))),
                    text=hit.passage.text,
                    url=url_of(hit.passage.chunk_id),
                    score=round(hit.passage.score, 4),
                )
                for hit in hits
            ]
        )

    async def fetch(id: Annotated[str, Field(description="of a passage that was found")]) -> Fetched:
        """Read a passage with what stands before and after it in its document."""
        try:
            number = int(id) if id.isascii() and id.isdigit() and len(id) < 19 else 0
            passage, before, after = await asyncio.to_thread(library.passage, owner, number)
        except RequestError as error:
            raise ToolError(str(error)) from None
        text = "\n".join((*before, passage.text, *after))
        told = {"side": service.side, "place": passage.place}
        return Fetched(id=id, title=passage.document, text=text, url=url_of(passage.chunk_id), metadata=told)

    server: MCPServer[Any] = MCPServer(
        "paceline", version=__version__, instructions=INSTRUCTIONS[service.side], log_level="ERROR"
    )
    for tool in (search, fetch):
        server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    return server


async def _exchanged(server: MCPServer[Any], request: Request, body: bytes) -> Response:
    """The SDK's answer to a body that has been read. Hosts and origins were checked at the door."""
    from mcp.server.transport_security import TransportSecuritySettings

    unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(stateless_http=True, json_response=True, transport_security=unchecked)
    said = [each for each in request.headers.raw if each[0] == b"accept" or each[0].startswith(b"mcp-")]
    inside = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline")
    async with server.session_manager.run(), inside:
        found = await inside.post("/mcp", content=body, headers=[*said, (b"content-type", b"application/json")])
    return Response(found.content, found.status_code, media_type=found.headers.get("content-type"))
