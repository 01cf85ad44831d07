"""Multipart bodies: one file, which is spooled to disk, and a few fields.

Not handled: several files in one body; resuming an interrupted upload.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Receive

from paceline.api.http.body import ClientGoneError
from paceline.errors import RequestError
from paceline.rag.parsing.kinds import MAX_FILE_BYTES
from paceline.rag.store.files import too_large

MAX_FIELDS = 16  # besides the file
MAX_FIELD = 4096  # bytes
_MAX_OVERHEAD = 64 * 1024  # bytes of a body besides the file
PART_TIMEOUT = 60.0  # s between two parts of a body
TIMEOUT = 1800.0  # s for a whole body


@dataclass(frozen=True, slots=True)
class Upload:
    name: str  # as the client sent it
    content: BinaryIO  # at position 0; closed with the upload
    num_bytes: int
    fields: dict[str, str]  # the last of each name


@contextlib.asynccontextmanager
async def read_upload(request: Request, field: str = "file") -> AsyncIterator[Upload]:
    """Raises RequestError: 400 for any other form, 413 beyond MAX_FILE_BYTES, 408 when it arrives too slowly."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > MAX_FILE_BYTES + _MAX_OVERHEAD:
        raise too_large()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise RequestError("Send the file as multipart/form-data.", code="invalid_content_type")
    parser = MultiPartParser(
        request.headers, _parts(request.receive), max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD
    )
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
        if (file.size or 0) > MAX_FILE_BYTES:
            raise too_large()
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        yield Upload(file.filename or "", file.file, file.size or 0, fields)
    finally:
        await form.close()


async def _parts(receive: Receive) -> AsyncGenerator[bytes, None]:
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
        yield body


def _slow() -> RequestError:
    return RequestError("The request body did not arrive in time.", status=408)
