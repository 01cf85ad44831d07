"""HTTP connections that may be silent for so long and no longer.

uvicorn watches a connection between two requests only, and stops with the first byte of the next: who connects and says
nothing, or a byte a minute, holds a place for ever. Here every connection has a time to say what it wants.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for a request's whole head; browsers open connections ahead of need, and open others when these close


class HttpConnection(H11Protocol):
    """Closed where no request is being answered and the head of the next one takes more than `head_s`.

    The body has a limit of its own, in `body`. Between an answer and the first byte of the next request uvicorn's own
    limit holds, `timeout_keep_alive`. What is left of a body after its answer counts as the next head.
    """

    head_s = HEAD_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.head_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None and self.transport.get_protocol() is self and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.head_s, self._too_slow)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._forget()  # from here on it is a WebSocket, which has its own limits
        super().handle_websocket_upgrade(event)

    def _too_slow(self) -> None:
        self._deadline = None
        self.transport.close()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
