"""The events of one response from the token log to a client, named as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.generation.streaming import put, send_part
from paceline.api.http import sse
from paceline.api.http.body import ClientGoneError, while_connected
from paceline.api.http.errors import failure_of
from paceline.api.http.strict_json import encode_json
from paceline.api.responses.event_log import Reader
from paceline.errors import PacelineError


class LoggedStream(Response):
    """Sends what `reader` reads, and a comment after `keep_alive` seconds of silence. There is no [DONE] at the end.

    `left`: called when the client has gone before the end.
    """

    def __init__(self, reader: Reader, keep_alive: float, left: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__()
        self._reader = reader
        self._keep_alive = keep_alive
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        try:
            await while_connected(receive, self._write(send))
        except BaseException:
            if self._left is not None:
                await self._left()
            raise

    async def _write(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while (rows := await self._reader.next(self._keep_alive)) != []:
                if rows is None:
                    await put(send, sse.PING)
                else:
                    await put(send, b"".join(sse.named(row.type, row.data) for row in rows))
            await put(send, b"", last=True)
        except ClientGoneError:
            raise
        except PacelineError as error:  # the log cannot be written or read: this much is said without it
            said = {"type": "error", "code": "server_error", "message": failure_of(error).message, "param": None}
            body = encode_json(said | {"sequence_number": self._reader.after + 1})
            await put(send, sse.named("error", body), last=True)
