"""An HTTP answer's body within a limit of bytes, before and after decompression.

httpx would decompress what has arrived whole, a thousandfold of it in memory; here the limit holds while decompressing.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import httpx

from paceline.errors import WebError

ACCEPTED_ENCODINGS = "gzip"
_GZIP_BITS = 16 + zlib.MAX_WBITS  # of zlib: a gzip header is required


async def read_body(response: httpx.Response, name: str, max_bytes: int) -> bytes:
    """The decoded body. `name`: whose it is, for errors. What follows the first member of a gzip file is left out.

    Raises WebError for one of more than max_bytes, compressed otherwise than with gzip, or damaged; httpx.HTTPError as
    httpx does.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", ""):
        raise WebError(f"{name} is compressed in a way that was not asked for.")
    inflater = zlib.decompressobj(_GZIP_BITS) if "gzip" in encoding else None
    parts: list[bytes] = []
    received = size = 0
    async with aclosing(cast(AsyncGenerator[bytes, None], response.aiter_raw())) as pieces:
        async for piece in pieces:
            received += len(piece)
            part = piece if inflater is None else _inflated(inflater, piece, name, max_bytes - size + 1)
            size += len(part)
            if max(size, received) > max_bytes:
                raise WebError(f"{name} has more than {max_bytes >> 10} KiB.")
            parts.append(part)
            if inflater is not None and inflater.eof:
                break
    if inflater is not None and not inflater.eof:
        raise WebError(f"{name} ends in the middle.")
    return b"".join(parts)


def _inflated(inflater: zlib._Decompress, data: bytes, name: str, room: int) -> bytes:
    """What the data decompress to, `room` bytes at most."""
    try:
        return inflater.decompress(data, room)
    except zlib.error:
        raise WebError(f"{name} is compressed and damaged.") from None
