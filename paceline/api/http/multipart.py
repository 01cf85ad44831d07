"""Multipart bodies: one file, whose bytes go where they are to be kept as they come, and a few fields.

Not handled: several files in one body; resuming an interrupted upload.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Receive

from paceline.api.http.body import ClientGoneError
from paceline.errors import RequestError
from paceline.rag.parsing.kinds import MAX_FILE_BYTES
from paceline.rag.store.files import Arrival, too_large

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
    declared = request.headers.get("content-length", "")
    announced = int(declared[:20]) if declared.isascii() and declared.isdigit() else 0
    if announced > MAX_FILE_BYTES + _MAX_OVERHEAD:
        raise too_large()
    return max(0, announced - _MAX_OVERHEAD)


@contextlib.asynccontextmanager
async def read_upload(
    request: Request, arrival: Arrival, turn: Callable[[], Awaitable[None]], field: str = "file"
) -> AsyncIterator[Upload]:
    """Write the file of a form to `arrival`. turn: waits until the next part of the body may be handled. Raises
    RequestError: 400 for any other form, 413 beyond MAX_FILE_BYTES, 408 when it arrives too slowly, and what
    `Arrival.write` raises."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise RequestError("Send the file as multipart/form-data.", code="invalid_content_type")
    parser = _FormParser(request.headers, _parts(request.receive, turn), arrival)
    try:
        async with asyncio.timeout(TIMEOUT):
            form = await parser.parse()
    except TimeoutError:
        raise _slow() from None
    except MultiPartException as error:
        raise RequestError(f"The form cannot be read: {error.message}") from None
    except ValueError:  # an unknown charset
        raise RequestError("The form cannot be read: its names are not in the charset it says.") from None
    try:
        file = form.get(field)
        if not isinstance(file, UploadFile):
            raise RequestError(f"The form has no file in the field {field}.", param=field)
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        yield Upload(file.filename or "", fields)
    finally:
        await form.close()


async def _parts(receive: Receive, turn: Callable[[], Awaitable[None]]) -> AsyncGenerator[bytes, None]:
    total = 0
    more = True
    while more:
        try:
            async with asyncio.timeout(PART_TIMEOUT):
                message = await receive()
        except TimeoutError:
            raise _slow() from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body: bytes = message.get("body", b"")
        total += len(body)
        if total > MAX_FILE_BYTES + _MAX_OVERHEAD:
            raise too_large()
        more = message.get("more_body", False)
        await turn()
        yield body


def _slow() -> RequestError:
    return RequestError("The request body did not arrive in time.", status=408)
