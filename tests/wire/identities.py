"""Keys, introductions and handshakes of the two sides that tests link."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.runtime.identity import PrivateKey, cloud_handshake, device_handshake
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Authenticate, Claim, Effect, Transmit
from paceline.wire.identity import DiallerHandshake, ListenerHandshake
from paceline.wire.link import LinkMachine
from paceline.wire.messages import Introduction

SERVER = PrivateKey(bytes([1] * 32))
LAPTOP = PrivateKey(bytes([2] * 32))
STRANGER = PrivateKey(bytes([3] * 32))
DEVICE = Introduction(
    tokenizer="bytes",
    model="0" * 64,
    model_name="small",
    strategies=["aggregate", "autoregressive"],
    documents=3,
    asked_by=None,
)
CLOUD = Introduction(
    tokenizer="bytes",
    model="1" * 64,
    model_name="large",
    strategies=["autoregressive", "aggregate", "pipeline"],
    documents=5,
)


def known_as(introduction: Introduction, tokenizer: str, strategies: Sequence[str]) -> Introduction:
    return msgspec.structs.replace(introduction, tokenizer=tokenizer, strategies=list(strategies))


def device_end(
    introduction: Introduction = DEVICE, *keys: PrivateKey, server_key: bytes = SERVER.public_key
) -> DiallerHandshake:
    return device_handshake(introduction, device="laptop", keys=keys or (LAPTOP,), server_key=server_key)


def cloud_end(introduction: Introduction = CLOUD, key: PrivateKey = SERVER) -> ListenerHandshake:
    return cloud_handshake(introduction, key)


def frame_of(effects: Sequence[Effect]) -> bytes:
    """The only frame that is sent."""
    [found] = [effect.data for effect in effects if isinstance(effect, Transmit)]
    return found


def challenged(device: LinkMachine, cloud: LinkMachine) -> bytes:
    """Drive both ends up to the device's proof, and return its frame."""
    cloud.connection_made(0.0)
    return frame_of(device.received(frame_of(cloud.received(frame_of(device.connection_made(0.0)), 0.1)), 0.1))


def claim_of(effects: Sequence[Effect]) -> Claim:
    [found] = [effect.claim for effect in effects if isinstance(effect, Authenticate)]
    return found


def checked(claim: Claim, *known: PrivateKey) -> bytes | CloseCode:
    """What a registry that knows these keys of the laptop, the laptop's own by default, says to a claim."""
    keys = [key.public_key for key in known or (LAPTOP,)]
    return next((key for key in keys if claim.device == "laptop" and claim.proves(key)), CloseCode.BAD_CREDENTIAL)


async def admit(claim: Claim) -> bytes | CloseCode:
    return checked(claim)


def shake_hands(device: LinkMachine, cloud: LinkMachine, now: float = 0.0) -> tuple[list[Effect], list[Effect]]:
    """Drive two new machines through the handshake. Returns the last effects of the device and of the cloud."""
    cloud.connection_made(now)
    challenge = frame_of(cloud.received(frame_of(device.connection_made(now)), now))
    claim = claim_of(cloud.received(frame_of(device.received(challenge, now)), now))
    admitted = cloud.authenticated(checked(claim), now)
    welcome = next(effect.data for effect in admitted if isinstance(effect, Transmit))
    return device.received(welcome, now), admitted
