"""Server-sent events of one response from the event log, named as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.generation.sending import put, send_part
from paceline.api.http import sse
from paceline.api.http.body import ClientGoneError, while_connected
from paceline.api.http.errors import failure_of
from paceline.api.http.strict_json import encode_json
from paceline.api.responses.event_log.log import EventReader
from paceline.errors import PacelineError


class EventLogAnswer(Response):
    """Sends the events of `reader`, and a comment after `keep_alive` seconds of silence. There is no [DONE] at the end.

    `on_gone`: called when the client leaves before the end.
    """

    def __init__(
        self, reader: EventReader, keep_alive: float, on_gone: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        super().__init__()
        self._reader = reader
        self._keep_alive = keep_alive
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        try:
            await while_connected(receive, self._write(send))
        except BaseException:
            if self._on_gone is not None:
                await self._on_gone()
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
        except PacelineError as error:  # the log cannot be written or read: this event is not in it
            event = {"type": "error", "code": "server_error", "message": failure_of(error).message, "param": None}
            body = encode_json(event | {"sequence_number": self._reader.after + 1})
            await put(send, sse.named("error", body), last=True)
