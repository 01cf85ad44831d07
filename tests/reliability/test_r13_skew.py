"""R13: peers of another version, family of strategies or key. Closed with a named code and a sentence, and nothing
of an answer is sent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from websockets.exceptions import ConnectionClosed

from device_agent.cloud import exchange
from paceline.runtime.identity import PrivateKey, device_handshake
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import decode
from paceline.wire.effects import Disconnected
from paceline.wire.link import LinkMachine
from paceline.wire.messages import VERSION, Challenge, Introduction, Welcome
from tests.reliability.conftest import Figure
from tests.server.test_links import connected, site
from tests.wire.identities import DEVICE, frame_of

pytestmark = pytest.mark.anyio

SKEWED: dict[str, tuple[Introduction, CloseCode]] = {
    "strategies": (replace(DEVICE, strategies=["telepathy"]), CloseCode.NO_COMMON_STRATEGY),
    "key": (DEVICE, CloseCode.BAD_CREDENTIAL),
}


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_another_version_is_told_so(tmp_path: Path, version: int, figure: Figure) -> None:
    async with site(tmp_path) as here, connected(here.url) as connection:
        await connection.send(msgspec.msgpack.encode(["hello", version, "of", "another", "release"]))
        with pytest.raises(ConnectionClosed):
            await connection.recv(decode=False)
        assert connection.close_code == CloseCode.VERSION_MISMATCH
        assert f"who dialled speaks {version}, who listens {VERSION}" in (connection.close_reason or "")
        assert here.peers.links.empty()
        figure(f"version {version - VERSION:+d}: frames before the close", 0, at_most=0)


@pytest.mark.parametrize("what", SKEWED)
async def test_a_peer_that_cannot_take_part_is_told_why(tmp_path: Path, what: str, figure: Figure) -> None:
    introduction, code = SKEWED[what]
    async with site(tmp_path) as here:
        credential = await exchange(here.url, here.registry.add("phone"))
        keys = (PrivateKey.generate(),) if what == "key" else credential.keys
        handshake = device_handshake(introduction, device="phone", keys=keys, server_key=credential.server_key)
        device = LinkMachine(handshake)
        frames = 0
        async with connected(here.url) as connection:
            await connection.send(frame_of(device.connection_made(0.0)))
            with pytest.raises(ConnectionClosed):
                while True:
                    frame = await connection.recv(decode=False)
                    message = decode(frame)
                    assert isinstance(message, Challenge | Welcome), "more than the handshake was sent"
                    frames += isinstance(message, Welcome)
                    await connection.send(frame_of(device.received(frame, 0.0)))
        assert connection.close_code == code
        (end,) = device.connection_lost(connection.close_code, connection.close_reason or "")
        assert isinstance(end, Disconnected) and end.reason.endswith("."), "a sentence for the device's owner"
        assert here.peers.links.empty()
        figure(f"other {what}: frames after the challenge", frames, at_most=0)
