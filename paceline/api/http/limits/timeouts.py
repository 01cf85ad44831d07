"""HTTP connections that are counted at the doors, with a time limit on each request's head and on each stranger.

uvicorn limits the time between two requests only, up to the first byte of the next: a client that connects and sends
nothing, or one byte a minute, would keep its connection for ever; so would one that does not read its answer.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from paceline.api.http.limits.doors import GRACE_S, Doors, Visitor
from paceline.local_users import is_own_user
from paceline.runtime.link.transport import CONNECTION

HEAD_S = 5.0  # for a whole head; browsers open connections in advance, and replace them when they are closed
STRANGER_S = 15.0  # for a whole request of a stranger, answer included: its body has less (`admission.OPEN_BODY_S`)


class HttpConnection(H11Protocol):
    """Breaks the connection when no request is being answered and the next head takes more than `head_s`, or when a
    stranger's request takes more than `stranger_s`.

    The limit on a body is in `body`. Between an answer to a known sender and the first byte of the next request
    uvicorn's `timeout_keep_alive` applies. The rest of a body after its answer counts as the next head.
    """

    head_s = HEAD_S
    stranger_s = STRANGER_S

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        doors: Doors,
        max_connections: int,
    ) -> None:
        """max_connections: beyond it a new one is broken unread."""
        super().__init__(config, server_state, dict(app_state), _loop)
        self._doors = doors
        self._max_connections = max_connections
        self._visitor: Visitor | None = None  # while the connection is open
        self._deadline: asyncio.TimerHandle | None = None
        self._timed: RequestResponseCycle | None = None  # the request that the deadline is for; None: for a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        own_user = partial(is_own_user, self.client, self.server)
        self._visitor = Visitor(self._doors, self.client[0] if self.client else "", transport.abort, own_user)
        self.app_state[CONNECTION] = self._visitor
        if len(self.connections) > self._max_connections:
            transport.abort()
            return
        self._limit(self.head_s)
        self.loop.call_later(GRACE_S, self._linger, self._visitor)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._visitor is not None:
            self._visitor.gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is not self or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self._timed is not self.cycle:
                self._timed = self.cycle
                self._limit(self.stranger_s)
        elif self._deadline is None:
            self._limit(self.head_s)

    def on_response_complete(self) -> None:
        self._cancel_deadline()
        if self._visitor is not None and not self._visitor.known:
            self._limit(self.head_s)  # sooner than `timeout_keep_alive`
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._cancel_deadline()  # a WebSocket has its own limits, and the end of its route is its visitor's
        super().handle_websocket_upgrade(event)

    def _linger(self, visitor: Visitor) -> None:
        # A request that has come in this turn of the loop is identified in the next.
        self.loop.call_soon(visitor.linger)

    def _overdue(self) -> None:
        self._deadline = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._visitor is not None and self._visitor.known:
            return  # an answer may take its time
        self.transport.abort()

    def _limit(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self._overdue)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
