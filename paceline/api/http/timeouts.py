"""HTTP connections with a time limit on each request's head.

uvicorn limits the time between two requests only, up to the first byte of the next: a client that connects and sends
nothing, or one byte a minute, would keep its connection for ever.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for a whole head; browsers open connections in advance, and replace them when they are closed


class HttpConnection(H11Protocol):
    """Closes the connection when no request is being answered and the next head takes more than `head_s`.

    The limit on a body is in `body`. Between an answer and the first byte of the next request uvicorn's
    `timeout_keep_alive` applies. The rest of a body after its answer counts as the next head.
    """

    head_s = HEAD_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.head_s, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_deadline()
        elif self._deadline is None and self.transport.get_protocol() is self and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.head_s, self._close)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._cancel_deadline()  # a WebSocket has its own limits
        super().handle_websocket_upgrade(event)

    def _close(self) -> None:
        self._deadline = None
        self.transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
