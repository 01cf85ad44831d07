"""Bodies: of requests, read within limits; of lists, in pages; and the detection of clients that leave.

A sibling task watches `receive` for the disconnect. The next `send` would notice it too late: a generation may wait
long for its next token (ASGI, "Disconnect - receive event").
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.config import JsonDict
from pydantic_core import CoreSchema
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.core.fair import Shares
from paceline.errors import RequestError
from paceline.rag.parsing.kinds import MAX_FILE_BYTES
from paceline.rag.store.files import Arrival, Paging, too_large
from paceline.rag.store.vector_stores import Status

MAX_BODY = 1_048_576  # bytes
BODY_TIMEOUT = 60.0  # s for a whole body
PIECE = 1 << 16  # bytes of a large answer that are given to its connection at a time

Json = dict[str, object]
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection, so that no answer can be sent."""


class BrokenOffError(Exception):
    """An answer has failed after it had begun, and the client has been told: its body must not end as if it were
    whole."""


def within(receive: Receive, seconds: float) -> Receive:
    """`receive`, for a body that must be there `seconds` from now: else it raises RequestError 408."""
    deadline = asyncio.get_running_loop().time() + seconds
    whole = False

    async def timely() -> Message:
        nonlocal whole
        if whole:
            return await receive()  # waits until the client leaves
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise _too_slow(seconds) from None
        whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return timely


async def read_body(request: Request, max_bytes: int = MAX_BODY) -> bytes:
    """The whole body. Raises RequestError 413 beyond `max_bytes`, 408 after BODY_TIMEOUT, and ClientGoneError."""
    if _announced(request) > max_bytes:
        raise body_too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise body_too_large(max_bytes)
    except TimeoutError:
        raise _too_slow(BODY_TIMEOUT) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def _announced(request: Request) -> int:
    """Bytes of the body that the request announces; 0 where it does not say."""
    length = request.headers.get("content-length", "")
    return int(length[:20]) if length.isascii() and length.isdigit() else 0  # h11 accepts up to 20 digits


def _too_slow(seconds: float) -> RequestError:
    return RequestError(f"The request body did not arrive within {seconds:g} s.", status=408)


def body_too_large(max_bytes: int) -> RequestError:
    return RequestError(f"The request body is larger than {max_bytes} bytes.", status=413, code="request_too_large")


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`. As soon as the client leaves, cancels `work` and raises ClientGoneError.

    The body must have been read. Both tasks have ended when this returns or raises.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- multipart bodies: one file, whose bytes go where they are to be kept as they come, and a few fields -------------
# Not handled: several files in one body; resuming an interrupted upload.
MAX_FIELDS = 16  # besides the file
MAX_FIELD = 4096  # bytes
_MAX_OVERHEAD = 64 * 1024  # bytes of a body besides the file
PART_TIMEOUT = 60.0  # s between two parts of a body
TIMEOUT = 1800.0  # s for a whole body


@dataclass(frozen=True, slots=True)
class Upload:
    name: str  # as the client sent it
    fields: dict[str, str]  # the last of each name


class _FormParser(MultiPartParser):
    """Starlette's parser, with a file other than its temporary one. A form has one file at most."""

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None], arrival: Arrival) -> None:
        super().__init__(headers, stream, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD)
        self._arrival = arrival

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        if part.file is not None:
            part.file.file.close()
            part.file = UploadFile(
                file=self._arrival,  # type: ignore[arg-type]  # it has what `UploadFile` calls here
                size=0,
                filename=part.file.filename,
                headers=part.file.headers,
            )


def least_bytes(request: Request) -> int:
    """Bytes of a file that the request announces at least. Raises RequestError 413 beyond MAX_FILE_BYTES."""
    announced = _announced(request)
    if announced > MAX_FILE_BYTES + _MAX_OVERHEAD:
        raise too_large()
    return max(0, announced - _MAX_OVERHEAD)


@contextlib.asynccontextmanager
async def read_upload(request: Request, arrival: Arrival, turn: Callable[[], Awaitable[None]]) -> AsyncIterator[Upload]:
    """Write the file of a form to `arrival`. turn: waits until the next part of the body may be handled. Raises
    RequestError: 400 for any other form, 413 beyond MAX_FILE_BYTES, 408 when it arrives too slowly, and what
    `Arrival.write` raises."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise RequestError("Send the file as multipart/form-data.", code="invalid_content_type")
    parser = _FormParser(request.headers, _parts(request, turn), arrival)
    try:
        async with asyncio.timeout(TIMEOUT):
            form = await parser.parse()
    except TimeoutError:
        raise _too_slow(TIMEOUT) from None
    except MultiPartException as error:
        raise RequestError(f"The form cannot be read: {error.message}") from None
    except ValueError:  # an unknown charset
        raise RequestError("The form cannot be read: its names are not in the charset it says.") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise RequestError("The form has no file in the field file.", param="file")
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        yield Upload(file.filename or "", fields)
    finally:
        await form.close()


async def _parts(request: Request, turn: Callable[[], Awaitable[None]]) -> AsyncGenerator[bytes, None]:
    total = 0
    pieces = request.stream()
    while True:
        try:
            async with asyncio.timeout(PART_TIMEOUT):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise _too_slow(PART_TIMEOUT) from None
        except ClientDisconnect:
            raise ClientGoneError from None
        if piece is None:
            return
        total += len(piece)
        if total > MAX_FILE_BYTES + _MAX_OVERHEAD:
            raise too_large()
        await turn()
        yield piece


# ---- strict JSON ----------------------------------------------------------------------------------------------------
# Decoding accepts an object in UTF-8 without NaN, lone surrogates or nesting that exhausts the stack; anything else is
# a 400, never a 500. Encoding refuses NaN too, and writes characters instead of escapes.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")  # lone, or one of a pair


def encode_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises RequestError (400) for anything else."""
    try:
        value: object = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite)
        if _SURROGATE_ESCAPE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise RequestError("The request body is not valid UTF-8.") from None
    except UnicodeEncodeError:
        raise RequestError("The request body holds half of a surrogate pair, which is no character.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    except ValueError as error:  # also an integer of too many digits
        raise RequestError(f"The request body could not be parsed as JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.")
    return value


def _finite(text: str) -> float:
    """Parse a number. Refuses one that overflows to infinity, which could not be encoded again."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:32]} is too large a number")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# ---- validation of JSON bodies: the base class of every request schema, and the first fault as a sentence -----------
# An explicit null means absent, since typed clients send nulls. Knows no endpoint.

# Names of union branches, which are not part of a field's path.
_BRANCH = re.compile(r"<.*|str|bool|int|float|constrained-str|(list|dict)\[.*\]")


def _nullable(schema: JsonDict) -> None:
    """Allow null for every optional field in a schema of `openapi.json`."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(properties, dict):
        return
    for name, field in properties.items():
        if not isinstance(field, dict) or (isinstance(required, list) and name in required):
            continue
        branches = field.get("anyOf")
        if not isinstance(branches, list) or {"type": "null"} not in branches:
            rest: JsonDict = {key: field.pop(key) for key in ("description", "default") if key in field}
            properties[name] = {"anyOf": [field, {"type": "null"}], **rest}


def _stop_at_faults(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for each in schema.values():
            _stop_at_faults(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            _stop_at_faults(each)


class Schema(BaseModel):
    """Strict about types (no "1" for 1); ignores unknown fields and nulls. A list is read up to its first fault: 8 MiB
    may have millions, of which pydantic makes gigabytes for the one that is told."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, frozen=True, json_schema_extra=_nullable
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_faults(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class QuerySchema(Schema):
    """A query. Not strict about types: a query string has none."""

    model_config = ConfigDict(strict=False)


S = TypeVar("S", bound=Schema)


def parse(schema: type[S], body: Mapping[str, object]) -> S:
    """Raises RequestError (400) for the first fault, with the path of the field."""
    try:
        return schema.model_validate(dict(body))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise refusal(fault["loc"], fault["type"], fault["msg"]) from None


def refusal(place: Iterable[int | str], kind: str, message: str) -> RequestError:
    """A fault that pydantic has found, as a sentence with the path of the field."""
    param = ""
    for step in place:
        if isinstance(step, int):
            param += f"[{step}]"
        elif not _BRANCH.fullmatch(step):
            param += f".{step}" if param else step
    if kind == "missing":
        sentence = f"The field {param} is required."
    elif kind == "extra_forbidden":
        sentence = f"Unknown field {param[:128]}."
    elif kind in ("model_type", "model_attributes_type"):  # pydantic speaks of dictionaries and instances
        sentence = f"{param[:128]} cannot be used: input should be an object."
    else:
        sentence = f"{param[:128]} cannot be used: {message[:1].lower()}{message[1:]}."
    return RequestError(sentence, param=param[:128] or None)


# ---- lists in pages, by cursors as OpenAI's clients expect them; small JSON answers ----------------------------------
Cursor = Annotated[str, Field(max_length=512)]  # an id, which clients may have given an item


class PageQuery(QuerySchema):
    """Query of a list."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Cursor | None = None
    before: Cursor | None = None

    @property
    def paging(self) -> Paging:
        return Paging(self.limit, self.order, self.after or None, self.before or None)


class FilesQuery(PageQuery):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    purpose: Annotated[str, Field(max_length=64)] | None = None


class AttachedQuery(PageQuery):
    filter: Status | None = None


def page_of(items: Sequence[Mapping[str, object]], asked: PageQuery) -> tuple[list[Mapping[str, object]], bool]:
    """A page of items that are in memory, oldest first, and whether there are more. Raises RequestError (400)."""
    page = list(reversed(items)) if asked.order == "desc" else list(items)
    for name, cursor in (("after", asked.after), ("before", asked.before)):
        if cursor is None:
            continue
        at = next((index for index, item in enumerate(page) if item["id"] == cursor), None)
        if at is None:
            raise RequestError(f"There is no item {cursor!r} in this list.", param=name)
        page = page[at + 1 :] if name == "after" else page[:at]
    return page[: asked.limit], len(page) > asked.limit


def listing(items: Sequence[Mapping[str, object]], more: bool) -> Response:
    ids = [item["id"] for item in items]
    return answer(
        {
            "object": "list",
            "data": list(items),
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": more,
        }
    )


def answer(value: Mapping[str, object], status: int = 200) -> Response:
    return Whole(encode_json(value), status_code=status, media_type="application/json")


class Whole(Response):
    """A body that is in memory until its client has read it, which may take long. A key has a share of what all of
    them take; small ones are not counted. Raises RequestError (429) before anything has been sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        size = len(self.body)
        if size <= PIECE:
            await super().__call__(scope, receive, send)
            return
        unread: Shares = scope["app"].state.admission.unread
        owner = scope["state"]["identity"].key
        if not unread.take(owner, size):
            raise RequestError(
                f"{unread.held(owner)} bytes of answers to this key are not read yet. Read them, or try again later.",
                status=429,
                type="rate_limit_error",
                code="too_many_unread_bytes",
            )
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for end in range(PIECE, size + PIECE, PIECE):  # each waits until most of those before it have been read
                piece = self.body[end - PIECE : end]
                await send({"type": "http.response.body", "body": piece, "more_body": end < size})
        finally:
            unread.give_back(owner, size)


def deleted(id: str, kind: str) -> Response:
    return answer({"id": id, "object": kind, "deleted": True})
