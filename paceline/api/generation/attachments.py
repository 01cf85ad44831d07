"""Files in messages: read by the sandboxed parser and put into the message as text, before a body is validated.

A file comes in the body, as base64, or by the id of an upload: as a part `file` (chat), `input_file` (responses) or
`document` (Anthropic's). What is too long for the context is refused as any long message is. Files are not fetched from
the web. One file of a key is read at a time, so that others' wait for few; none is kept.
"""

from __future__ import annotations

import asyncio
import base64
import mimetypes
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import PurePath
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from starlette.requests import Request

from paceline.api.generation.schema import required, unreadable
from paceline.api.http.body import MAX_BODY, Json, decode_object, read_body, while_connected
from paceline.api.http.body import body_too_large as too_large
from paceline.api.http.routing import Route
from paceline.core.attached import framed
from paceline.errors import DocumentError, ParserLost, RequestError
from paceline.rag.parsing.process import Parsed, ParserPool, memory_file
from paceline.rag.store.files import harmless, missing
from paceline.runtime.service import Service
from paceline.runtime.units import Turnstile

MAX_BODY_WITH_FILES = 8 * MAX_BODY  # bytes, of which all but the files may be MAX_BODY
MAX_FILES = 32  # in one request
MAX_TEXT = 2 << 20  # characters of all of them


_FILES = ("file", "input_file", "document")
_IMAGES = ("image", "image_url", "input_image")
_LARGE = (b'"file_data"', b'"data"', b'"image_url"')  # fields, in a body that may be larger than others
_CONVERSATIONS = ("messages", "input", "items")  # fields of a body


class Attachments:
    """The parsers of one application, and the turns of its keys. Belongs to one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._parsers = ParserPool(budget=None if service.library is None else service.library.budget)
        self._turns = Turnstile()  # of keys, a file each
        self._reading = 0  # files

    async def close(self) -> None:
        await asyncio.to_thread(self._parsers.close)

    async def read(self, part: Json, where: str, owner: str) -> str:
        """The text of a file with its name, title and context. Raises RequestError that names the part."""
        if part["type"] != "document":
            fields, where = (part.get("file"), f"{where}.file") if part["type"] == "file" else (part, where)
            if not isinstance(fields, dict):
                raise required(where)
            name, text = await self._text(fields, "file_data", str(fields.get("filename") or ""), where, owner)
            return framed(name, text)
        source = part.get("source")
        if not isinstance(source, dict):
            raise required(f"{where}.source")
        match source.get("type"):
            case "text":
                text = _string(source, "data", f"{where}.source")
            case "content":
                text = "\n".join(_texts(source.get("content"), f"{where}.source.content"))
            case _:
                _, text = await self._text(source, "data", str(part.get("title") or ""), f"{where}.source", owner)
        return framed(str(part.get("title") or ""), "\n\n".join(filter(None, [str(part.get("context") or ""), text])))

    async def _text(self, fields: Json, data: str, name: str, where: str, owner: str) -> tuple[str, str]:
        """(name, text) of a file that is given by `file_id`, or by a field of base64."""
        if fields.get("file_id") is not None:
            library, file_id = self._service.library, _string(fields, "file_id", where)
            if library is None:
                raise RequestError("This side keeps no files: send file_data.", param=f"{where}.file_id")
            stored = await asyncio.to_thread(library.uploads.get, owner, file_id)
            return stored.name, await self._parsed(
                stored.name, lambda: library.uploads.open(file_id), where, owner, file_id
            )
        address = next((kind for kind in ("file_url", "url") if fields.get(kind) is not None), None)
        if address is not None:
            raise RequestError(
                f"Files are not fetched from the web here ({where}.{address}): send the file itself in {data}, or "
                "upload it with /v1/files and give its file_id.",
                code="unsupported_content",
                param=f"{where}.{address}",
            )
        given = _string(fields, data, where)
        head, comma, rest = given.partition(",")
        media = head.removeprefix("data:").split(";")[0] if comma else fields.get("media_type")
        name = harmless(name or "file")
        if not PurePath(name).suffix:
            name += mimetypes.guess_extension(str(media)) or ""

        def opened() -> BinaryIO:
            if comma and not head.endswith(";base64"):
                return memory_file(unquote_to_bytes(rest))
            try:
                return memory_file(base64.b64decode("".join((rest if comma else given).split()), validate=True))
            except ValueError:
                sentence = f"{where}.{data} is not base64: give the file's bytes so, best as data:TYPE;base64,BYTES."
                raise RequestError(sentence, param=f"{where}.{data}") from None

        return name, await self._parsed(name, opened, where, owner)

    async def _parsed(
        self, name: str, opened: Callable[[], BinaryIO], where: str, owner: str, file_id: str | None = None
    ) -> str:
        """The text of a file, which the owner's rules let be read. file_id: of an upload."""
        await self._turns.enter(owner)
        loop = asyncio.get_running_loop()
        self._reading += 1

        def ended(_: Future[Parsed]) -> None:
            loop.call_soon_threadsafe(self._end, owner)

        parsing = self._parsers.submit(name, opened, owner=owner)
        parsing.add_done_callback(ended)  # not before: a client that leaves has its file read to its end all the same
        try:
            text = (await asyncio.wrap_future(parsing)).text
        except DocumentError as error:
            raise RequestError(str(error), code=error.code, param=where) from None
        except FileNotFoundError:
            raise missing("file", name) from None
        except ParserLost as error:
            raise RequestError(str(error), status=503, type="server_error", code="parser_lost", param=where) from None
        if (library := self._service.library) is not None:
            await asyncio.to_thread(library.readable(owner).admit_file, name, text, file_id)
        return text

    def _end(self, owner: str) -> None:
        self._turns.leave(owner)
        self._reading -= 1
        if not self._reading:
            asyncio.get_running_loop().run_in_executor(None, self._parsers.rest)


class ConversationRoute(Route):
    """A route whose body holds a conversation, with files in it."""

    async def read(self, request: Request) -> Mapping[str, object]:
        return await read_conversation(request)


class PromptRoute(Route):
    """A route that answers a prompt: its body is left unread where the key's answers have no room."""

    async def read(self, request: Request) -> Mapping[str, object]:
        service: Service = request.app.state.service
        await service.wait_for_room(request.state.identity.key)
        return await super().read(request)


class AnswerRoute(PromptRoute, ConversationRoute):
    """A route that answers a conversation: likewise."""


async def read_conversation(request: Request) -> Json:
    """The body of a request that holds a conversation, with the text of each file in the file's place. Raises
    RequestError: 400, 404 for an upload that the key does not have, 413."""
    received = await read_body(request, MAX_BODY_WITH_FILES)
    if len(received) > MAX_BODY and not any(name in received for name in _LARGE):
        raise too_large(MAX_BODY)
    is_small = len(received) <= MAX_BODY
    body = decode_object(received) if is_small else await asyncio.to_thread(decode_object, received)
    parts = [each for field in _CONVERSATIONS for each in _parts(body.get(field), field)]
    size = len(received) - sum(_size(siblings[index]) for siblings, index, _ in parts)
    if size > MAX_BODY:
        raise too_large(MAX_BODY)
    if len(parts) > MAX_FILES:
        raise RequestError(f"A request may have {MAX_FILES} files at most.", param=parts[MAX_FILES][2])
    if parts:
        await while_connected(request.receive, _replace(parts, request))
    return body


async def _replace(parts: list[tuple[list[object], int, str]], request: Request) -> None:
    attachments: Attachments = request.app.state.attachments
    length = 0
    for siblings, index, where in parts:
        part = siblings[index]
        assert isinstance(part, dict), "found by _parts"
        text = await attachments.read(part, where, request.state.identity.key)
        length += len(text)
        if length > MAX_TEXT:
            raise RequestError(
                f"The files of this request hold more than {MAX_TEXT} characters: ask about fewer or shorter ones, or "
                "put them into a vector store, which is searched.",
                code="context_length_exceeded",
                param=where,
            )
        if part["type"] != "document":  # whose surface puts lines between its blocks
            text = "\n\n".join(["", text, ""] if index else [text, ""])
        siblings[index] = {"type": "text", "text": text}


def _parts(messages: object, field: str) -> Iterator[tuple[list[object], int, str]]:
    """(list, index in it, name) of every file in a conversation. Raises RequestError for an image."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            for name in ("content", "output"):
                yield from _among(message.get(name), f"{field}[{number}].{name}")


def _among(siblings: object, where: str) -> Iterator[tuple[list[object], int, str]]:
    if not isinstance(siblings, list):
        return
    for index, part in enumerate(siblings):
        if isinstance(part, dict):
            named = f"{where}[{index}]"
            if part.get("type") in _IMAGES:
                raise unreadable(str(part["type"]), named)
            if part.get("type") in _FILES:
                yield siblings, index, named
            elif part.get("type") == "tool_result":
                yield from _among(part.get("content"), f"{named}.content")


def _size(part: object) -> int:
    """Characters of a file in the body."""
    assert isinstance(part, dict), "found by _parts"
    fields = part.get("source") or part.get("file") or part
    given = [fields.get(name) for name in ("data", "file_data")] if isinstance(fields, dict) else []
    return sum(len(one) for one in given if isinstance(one, str))


def _string(fields: Mapping[str, object], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"The field {where}.{name} must be a text.", param=f"{where}.{name}")
    return value


def _texts(content: object, where: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for index, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise unreadable(str(kind), f"{where}[{index}]")
        yield _string(block, "text", f"{where}[{index}]")
