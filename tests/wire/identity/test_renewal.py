"""Renewal of a device's key over an open link, interrupted at every point."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.runtime.identity import PrivateKey
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import decode, encode
from paceline.wire.effects import Deliver, Disconnected, Effect, KeepKey, MakeKey, SettleKey, Transmit
from paceline.wire.identity import PAUSE_S, CloudRenewal, DeviceRenewal
from paceline.wire.link import LinkMachine, LinkState
from paceline.wire.messages import KeyKept, NewKey, RenewKey
from tests.wire.identities import (
    DEVICE,
    LAPTOP,
    STRANGER,
    challenged,
    checked,
    cloud_end,
    device_end,
    frame_of,
    shake_hands,
)
from tests.wire.samples import KEY, SIGNATURE, have, opening

NEW = PrivateKey(bytes([9] * 32))


@dataclass
class Two:
    device: LinkMachine
    cloud: LinkMachine

    @property
    def asking(self) -> CloudRenewal:
        assert isinstance(self.cloud.renewal, CloudRenewal)
        return self.cloud.renewal

    @property
    def replying(self) -> DeviceRenewal:
        assert isinstance(self.device.renewal, DeviceRenewal)
        return self.device.renewal

    def offered(self, key: PrivateKey = NEW) -> bytes:
        """The cloud has asked and the device made a key: the frame of its reply."""
        assert self.device.received(frame_of(self.asking.ask()), 1.0) == [MakeKey()]
        return frame_of(self.replying.offer(key))


def two(*keys: PrivateKey) -> Two:
    both = Two(LinkMachine(device_end(DEVICE, *keys)), LinkMachine(cloud_end()))
    shake_hands(both.device, both.cloud)
    return both


def refusal(effects: list[Effect]) -> int:
    [end] = [effect for effect in effects if isinstance(effect, Disconnected)]
    return end.code


def test_a_key_is_renewed_while_a_session_goes_on() -> None:
    both = two()
    both.cloud.received(frame_of(both.device.send(opening(1))), 0.5)
    offer = both.offered()
    assert both.cloud.received(offer, 1.0) == [KeepKey("laptop", LAPTOP.public_key, NEW.public_key)]
    assert any(isinstance(effect, Deliver) for effect in both.cloud.received(encode(have(1)), 1.1))
    assert both.device.received(frame_of(both.asking.kept(NEW.public_key)), 1.2) == [SettleKey(NEW.public_key)]
    assert (both.device.state, both.cloud.state) == (LinkState.READY, LinkState.READY)
    assert any(isinstance(effect, Deliver) for effect in both.device.received(encode(have(1)), 1.3))


def test_a_key_is_renewed_again_from_the_renewed_one() -> None:
    both, newest = two(), PrivateKey(bytes([10] * 32))
    both.cloud.received(both.offered(), 1.0)
    both.device.received(frame_of(both.asking.kept(NEW.public_key)), 1.0)
    both.device.received(frame_of(both.asking.ask()), 1.0 + PAUSE_S)
    offer = frame_of(both.replying.offer(newest))
    assert both.cloud.received(offer, 3.0) == [KeepKey("laptop", NEW.public_key, newest.public_key)]


@pytest.mark.parametrize("stored", [False, True], ids=["before the cloud stored it", "after"])
def test_a_link_lost_in_mid_renewal_locks_nobody_out(stored: bool) -> None:
    """The device holds both keys then, and shows both: whichever the cloud has, it is let in, and drops the other."""
    held = NEW if stored else LAPTOP
    device, cloud = LinkMachine(device_end(DEVICE, LAPTOP, NEW)), LinkMachine(cloud_end())
    proof = challenged(device, cloud)
    [asked] = cloud.received(proof, 0.0)
    admitted = cloud.authenticated(checked(asked.claim, held), 0.0)  # type: ignore[union-attr]  # Authenticate
    welcome = next(effect.data for effect in admitted if isinstance(effect, Transmit))
    assert SettleKey(held.public_key) in device.received(welcome, 0.0)


def test_what_was_not_asked_for_changes_nothing() -> None:
    both = two()
    assert both.cloud.received(encode(NewKey(KEY, SIGNATURE, SIGNATURE)), 1.0) == []
    assert both.device.received(encode(KeyKept(SIGNATURE)), 1.0) == []
    assert both.cloud.received(encode(RenewKey()), 1.0) == []


def test_a_device_makes_few_keys_however_often_it_is_asked() -> None:
    both = two()
    asked = encode(RenewKey())
    made = [both.device.received(asked, 10.0 + PAUSE_S * number / 100) for number in range(300)]
    assert sum(effects == [MakeKey()] for effects in made) == 3


def test_an_offer_is_not_accepted_twice_nor_on_another_connection() -> None:
    both, other = two(), two()
    offer = both.offered()
    other.asking.ask()
    assert refusal(other.cloud.received(offer, 1.0)) == CloseCode.BAD_CREDENTIAL
    assert len(both.cloud.received(offer, 1.0)) == 1
    assert both.cloud.received(offer, 1.1) == []
    both.asking.kept(NEW.public_key)
    both.asking.ask()
    assert refusal(both.cloud.received(offer, 1.2)) == CloseCode.BAD_CREDENTIAL


def test_a_key_that_the_device_does_not_hold_is_not_taken() -> None:
    """Somebody in between offers a key of his own, or another's as the device's."""
    both = two()
    message = decode(both.offered())
    assert isinstance(message, NewKey)
    forged = NewKey(STRANGER.public_key, message.signature, message.possession)
    assert refusal(both.cloud.received(encode(forged), 1.0)) == CloseCode.BAD_CREDENTIAL
    both = two()
    message = decode(both.offered())
    assert isinstance(message, NewKey)
    borrowed = NewKey(message.key, message.signature, message.signature)
    assert refusal(both.cloud.received(encode(borrowed), 1.0)) == CloseCode.BAD_CREDENTIAL


def test_a_device_drops_its_key_at_the_clouds_word_only() -> None:
    both = two()
    both.offered()
    assert refusal(both.device.received(encode(KeyKept(SIGNATURE)), 1.0)) == CloseCode.SERVER_KEY_CHANGED
