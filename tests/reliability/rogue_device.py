"""A device with a valid key that says on its link what it likes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

from device_agent.cloud import Credential, exchange, link_url
from paceline.engine.fake import fake_model
from paceline.errors import LinkClosed, RemoteProtocolError
from paceline.runtime.identity import device_handshake
from paceline.runtime.link.transport import Transport, TransportClosed, dial
from paceline.strategies.registry import STRATEGIES
from paceline.wire.effects import Effect, Transmit
from paceline.wire.link import LinkMachine, LinkState
from paceline.wire.messages import Introduction
from tests.postgres import registry_of


def introduction() -> Introduction:
    model = fake_model()
    info = model.engine.info
    return Introduction(
        model.tokenizer.fingerprint, info.fingerprint, "honest", list(STRATEGIES), 2**31 - 1, asked_by=None
    )


class RogueLink:
    """One connection. The handshake is honest, and `captured` has its frames; what follows is up to the caller."""

    def __init__(self, transport: Transport, machine: LinkMachine) -> None:
        self.transport = transport
        self.captured: list[bytes] = []  # frames sent in the handshake, and with `say`
        self.heard = 0  # frames received after the handshake
        self._machine = machine

    @classmethod
    async def open(cls, url: str, credential: Credential) -> Self:
        """Link with this server. Raises LinkClosed where it does not admit the device."""
        handshake = device_handshake(
            introduction(), device=credential.device, keys=credential.keys, server_key=credential.server_key
        )
        link = cls(await dial(link_url(url)), LinkMachine(handshake))
        loop = asyncio.get_running_loop()
        await link._apply(link._machine.connection_made(loop.time()))
        while link._machine.state is not LinkState.READY:
            await link._apply(link._machine.received(await link.transport.recv_bytes(), loop.time()))
            if link._machine.state is LinkState.CLOSED:
                raise LinkClosed("the handshake failed")
        return link

    async def say(self, frame: bytes) -> None:
        """Send a frame, whatever it is. Raises TransportClosed."""
        self.captured.append(frame)
        await self.transport.send_bytes(frame)

    async def listen(self) -> int:
        """Take what comes until the server closes the connection; the code."""
        try:
            while True:
                await self.transport.recv_bytes()
                self.heard += 1
        except TransportClosed as end:
            return end.code
        except RemoteProtocolError as error:
            return int(error.close_code)

    async def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Transmit):
                self.captured.append(effect.data)
                await self.transport.send_bytes(effect.data)


async def enrolled(url: str, state: Path, name: str) -> Credential:
    """The credential of a new device at a server with this state folder."""
    return await exchange(url, registry_of(state).add(name))
