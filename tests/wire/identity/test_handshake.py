"""The handshake proves both keys, and a key is renewed over the link."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import LocalProtocolError
from paceline.runtime.identity import PrivateKey, verify
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import decode, encode
from paceline.wire.effects import (
    Authenticate,
    Deliver,
    Disconnected,
    Effect,
    KeepKey,
    MakeKey,
    SettleKey,
    Transmit,
    signed_bytes,
)
from paceline.wire.identity import CHALLENGE, PAUSE_S, CloudRenewal, DeviceRenewal, DiallerHandshake
from paceline.wire.link import LinkMachine, LinkState, Role
from paceline.wire.messages import NONCE_BYTES, VERSION, Challenge, Hello, KeyKept, NewKey, RenewKey
from tests.depth import DEPTH
from tests.wire.identities import (
    CLOUD,
    DEVICE,
    LAPTOP,
    SERVER,
    STRANGER,
    challenged,
    checked,
    claim_of,
    cloud_end,
    device_end,
    frame_of,
    shake_hands,
)
from tests.wire.samples import KEY, SIGNATURE, have, opening

TRIES = 1_000 * DEPTH


@dataclass(slots=True)
class Captured:
    """The frames of one honest handshake, in order: hello, challenge, proof, welcome; then some of its link."""

    frames: list[bytes] = field(default_factory=list)

    @property
    def to_cloud(self) -> list[bytes]:
        return self.frames[0:3:2]

    @property
    def to_device(self) -> list[bytes]:
        return self.frames[1:4:2]


def capture() -> Captured:
    device, cloud = LinkMachine(device_end()), LinkMachine(cloud_end())
    seen = Captured()

    def passed_on(frame: bytes) -> bytes:
        seen.frames.append(frame)
        return frame

    cloud.connection_made(0.0)
    hello = passed_on(frame_of(device.connection_made(0.0)))
    challenge = passed_on(frame_of(cloud.received(hello, 0.0)))
    proof = passed_on(frame_of(device.received(challenge, 0.0)))
    admitted = cloud.authenticated(checked(claim_of(cloud.received(proof, 0.0))), 0.0)
    device.received(passed_on(next(each.data for each in admitted if isinstance(each, Transmit))), 0.0)
    seen.frames += [frame_of(device.send(opening(1))), frame_of(device.send(have(1)))]
    assert (device.state, cloud.state) == (LinkState.READY, LinkState.READY)
    return seen


class Victim:
    """A fresh end of a link, which an attacker feeds with frames. `fooled`: it took him for its peer."""

    def __init__(self, role: Role) -> None:
        self.machine = LinkMachine(device_end() if role is Role.DIALLER else cloud_end())
        self.said: list[bytes] = []
        self._note(self.machine.connection_made(0.0))

    @property
    def fooled(self) -> bool:
        return self.machine.peer is not None

    def hear(self, frame: bytes) -> None:
        effects = self.machine.received(frame, 0.0)
        self._note(effects)
        for effect in effects:
            if isinstance(effect, Authenticate):
                self._note(self.machine.authenticated(checked(effect.claim), 0.0))

    def _note(self, effects: list[Effect]) -> None:
        self.said += [effect.data for effect in effects if isinstance(effect, Transmit)]


def replayed(chance: random.Random, known: list[Captured]) -> Iterator[bytes]:
    """Frames of captured handshakes: whole ones in order, or any of any in any order."""
    seen = chance.choice(known)
    if chance.random() < 0.3:
        yield from chance.choice([seen.to_cloud, seen.to_device, seen.frames])
        return
    for _ in range(chance.randint(1, 6)):
        yield chance.choice(chance.choice(known).frames)


def flipped(frame: bytes, chance: random.Random) -> bytes:
    changed = bytearray(frame)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


# ---- nothing that was said before is accepted -----------------------------------------------------------------------
def test_no_replay_reordering_or_mixture_of_captured_frames_is_accepted() -> None:
    chance, known = random.Random(1), [capture() for _ in range(8)]
    fooled = 0
    for _ in range(TRIES):
        victim = Victim(chance.choice(list(Role)))
        for frame in replayed(chance, known):
            # What it says itself may come back to it at any point, too.
            victim.hear(chance.choice(victim.said) if victim.said and chance.random() < 0.2 else frame)
        fooled += victim.fooled
    assert fooled == 0


def test_no_changed_bit_is_accepted() -> None:
    """One frame of a live handshake between honest ends has a bit flipped on its way: not both ends come up."""
    chance, up, refused = random.Random(2), 0, 0
    for _ in range(TRIES // 4):  # each is a handshake of four frames, each of which could be the one
        which = chance.randrange(4)
        device, cloud = LinkMachine(device_end()), LinkMachine(cloud_end())
        cloud.connection_made(0.0)
        waiting = [(cloud, effect.data) for effect in device.connection_made(0.0) if isinstance(effect, Transmit)]
        passed = 0
        while waiting and device.peer is None:
            target, frame = waiting.pop(0)
            effects = target.received(flipped(frame, chance) if passed == which else frame, 0.0)
            passed += 1
            for effect in list(effects):
                if isinstance(effect, Authenticate):
                    effects += target.authenticated(checked(effect.claim), 0.0)
            other = device if target is cloud else cloud
            waiting += [(other, effect.data) for effect in effects if isinstance(effect, Transmit)]
        up += device.peer is not None
        refused += which < 3 and cloud.peer is not None  # the cloud has no say in what becomes of its last frame
    assert (up, refused) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["ab", "ba", "own a", "own b"]), max_size=24), st.randoms(use_true_random=False))
def test_frames_of_two_handshakes_at_once_cannot_be_mixed(script: list[str], chance: random.Random) -> None:
    """Two devices dial one server at once; the attacker carries each one's frames to the other's connection. A
    connection comes up only if it has heard just what its own peer said."""
    devices = [Victim(Role.DIALLER) for _ in range(2)]
    clouds = [Victim(Role.LISTENER) for _ in range(2)]
    crossed = [False, False]
    for step in script:
        if step.startswith("own"):
            one = other = int(step == "own b")
        else:
            one, other = (0, 1) if step == "ab" else (1, 0)
        source, target = (devices[one], clouds[other]) if chance.random() < 0.5 else (clouds[one], devices[other])
        if source.said:
            crossed[other] |= one != other
            target.hear(source.said[-1])
    for number in range(2):
        if devices[number].fooled:
            assert devices[number].machine.handshake.identifier == clouds[number].machine.handshake.identifier


# ---- reflection, strangers, other keys ------------------------------------------------------------------------------
@pytest.mark.parametrize("role", Role)
def test_an_end_is_not_fooled_by_its_own_words(role: Role) -> None:
    other = Role.LISTENER if role is Role.DIALLER else Role.DIALLER
    mirror, victim = Victim(role), Victim(role)
    honest = Victim(other)
    for _ in range(4):
        for frame in [*mirror.said, *victim.said]:
            victim.hear(frame)
            mirror.hear(frame)
    assert not victim.fooled and not mirror.fooled and not honest.fooled


def test_a_server_with_the_devices_own_key_does_not_pass_for_the_server() -> None:
    """A key serves at one end: what a device has signed proves nothing for a cloud."""
    device, cloud = LinkMachine(device_end()), LinkMachine(cloud_end(CLOUD, LAPTOP))
    cloud.connection_made(0.0)
    effects = device.received(frame_of(cloud.received(frame_of(device.connection_made(0.0)), 0.0)), 0.0)
    assert isinstance(effects[-1], Disconnected) and effects[-1].code == CloseCode.SERVER_KEY_CHANGED


def test_a_stranger_in_the_servers_place_learns_no_more_than_a_name() -> None:
    device, stranger = LinkMachine(device_end()), LinkMachine(cloud_end(CLOUD, STRANGER))
    stranger.connection_made(0.0)
    hello = frame_of(device.connection_made(0.0))
    effects = device.received(frame_of(stranger.received(hello, 0.0)), 0.0)
    [end] = effects
    assert isinstance(end, Disconnected) and end.code == CloseCode.SERVER_KEY_CHANGED
    assert "set up anew, or somebody is in between" in end.reason
    message = decode(hello)
    assert isinstance(message, Hello)
    assert msgspec.structs.asdict(message) == {"version": VERSION, "device": "laptop", "nonce": message.nonce}


def test_a_stranger_in_the_devices_place_is_not_admitted() -> None:
    device, cloud = LinkMachine(device_end(DEVICE, STRANGER)), LinkMachine(cloud_end())
    proof = challenged(device, cloud)
    assert checked(claim_of(cloud.received(proof, 0.0))) is CloseCode.BAD_CREDENTIAL


def test_one_device_does_not_pass_for_another() -> None:
    tablet = DiallerHandshake(
        DEVICE,
        device="laptop",
        keys=[STRANGER],
        pinned=SERVER.public_key,
        binding=SERVER.public_key,
        nonce=bytes(NONCE_BYTES),
        verify=verify,
    )
    cloud = LinkMachine(cloud_end())
    device = LinkMachine(tablet)
    proof = challenged(device, cloud)
    claim = claim_of(cloud.received(proof, 0.0))
    assert claim.proves(STRANGER.public_key) and not claim.proves(LAPTOP.public_key)
    assert not replace(claim, device="tablet").proves(LAPTOP.public_key)


def test_a_claim_that_holds_for_one_server_does_not_for_another() -> None:
    """A dishonest server that a device is enrolled at cannot link to another server as that device."""
    rogue, honest = cloud_end(CLOUD, STRANGER), LinkMachine(cloud_end())
    device = LinkMachine(device_end(server_key=STRANGER.public_key))
    hello = frame_of(device.connection_made(0.0))
    honest.connection_made(0.0)
    theirs = decode(frame_of(honest.received(hello, 0.0)))
    assert isinstance(theirs, Challenge)
    rogue.nonce = theirs.nonce  # it passes the honest server's nonce off as its own
    proof = frame_of(device.received(rogue.greeted(decode(hello), hello), 0.0))  # type: ignore[arg-type]  # a Hello
    assert checked(claim_of(honest.received(proof, 0.0))) is CloseCode.BAD_CREDENTIAL


def _counted(version: int) -> bytes:
    """A version as it stands in what is signed."""
    return len(text := str(version).encode()).to_bytes(4) + text


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"paceline", b"pacelime"),
        lambda data: data.replace(b"listener challenge", b"listener_challenge"),
        lambda data: data.replace(_counted(VERSION), _counted(VERSION - 1)),
    ],
    ids=["another protocol", "another purpose", "another version"],
)
def test_a_signature_serves_one_purpose_of_one_version_of_one_protocol(change: Callable[[bytes], bytes]) -> None:
    device = LinkMachine(device_end())
    hello = frame_of(device.connection_made(0.0))
    nonce = bytes(NONCE_BYTES)
    signed = signed_bytes(CHALLENGE, SERVER.public_key, hello, b"", nonce)
    assert change(signed) != signed
    effects = device.received(encode(Challenge(VERSION, "", nonce, SERVER.sign(change(signed)))), 0.0)
    assert isinstance(effects[-1], Disconnected) and effects[-1].code == CloseCode.SERVER_KEY_CHANGED


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_what_is_signed_can_be_read_in_one_way_only(first: list[bytes], second: list[bytes]) -> None:
    assert (signed_bytes("a", *first) == signed_bytes("a", *second)) == (first == second)
    assert signed_bytes("a", *first) != signed_bytes("b", *second)


# ---- ordinary use ---------------------------------------------------------------------------------------------------
def test_both_ends_compute_one_identifier_and_no_two_connections_share_it() -> None:
    found = set()
    for _ in range(3):
        device, cloud = LinkMachine(device_end()), LinkMachine(cloud_end())
        shake_hands(device, cloud)
        assert device.handshake.identifier == cloud.handshake.identifier
        found.add(device.handshake.identifier)
    assert len(found) == 3


def test_a_handshake_serves_one_connection() -> None:
    once = device_end()
    once.begin()
    with pytest.raises(LocalProtocolError, match="one connection"):
        once.begin()


def test_a_key_that_is_none_verifies_nothing() -> None:
    assert not verify(b"short", bytes(64), b"")
    assert not verify(bytes(32), bytes(64), b"data")
    assert not verify(LAPTOP.public_key, b"", b"")
    with pytest.raises(ValueError, match="32"):
        PrivateKey(b"short")
    assert LAPTOP.seed.hex() not in repr(LAPTOP)


# ---- Renewal of a device's key over an open link, interrupted at every point ----------------------------------------
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
    """The device holds both keys then, and shows both: whichever the cloud has, it is let in, told, and drops the
    other."""
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
