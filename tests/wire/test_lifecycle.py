from __future__ import annotations

import itertools

import pytest

from paceline.errors import LinkClosed, LocalProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import encode
from paceline.wire.effects import Authenticate, Disconnected, Transmit
from paceline.wire.link import NEXT, TRIGGERS, LinkMachine, LinkState, Role, Trigger
from paceline.wire.messages import CONTROL_MESSAGES, STRATEGY_MESSAGES, Challenge, Welcome
from tests.wire.identities import LAPTOP, cloud_end, device_end, frame_of
from tests.wire.samples import PROOF, every_message, opening

SIGNED = (Challenge, Welcome)  # what a device checks at once


def machine_in(role: Role, state: LinkState) -> LinkMachine:
    """A link machine of this role driven to this state, with session 1 or 2 opened by the peer."""
    device, cloud = LinkMachine(device_end()), LinkMachine(cloud_end())
    machine = device if role is Role.DIALLER else cloud
    waits = role is Role.DIALLER and state is LinkState.AUTHENTICATING
    if waits:
        device.handshake.pinned = None  # as of a head, which looks up a stage's key by its name
    hello = frame_of(device.connection_made(0.0))
    cloud.connection_made(0.0)
    if state is LinkState.OPENING:
        return machine
    if state is LinkState.CLOSED:
        machine.close(CloseCode.CLOSING)
        return machine
    answer = device.received(frame_of(cloud.received(hello, 0.1)), 0.1)
    if waits:
        return machine
    proof = frame_of(answer)
    if state is LinkState.CHALLENGED:
        return machine
    cloud.received(proof, 0.1)
    if state is LinkState.AUTHENTICATING:
        return machine
    welcome, *_ = cloud.authenticated(LAPTOP.public_key, 0.2)
    assert isinstance(welcome, Transmit)
    device.received(welcome.data, 0.2)
    machine.received(encode(opening(peers_number(role))), 0.3)
    if state is LinkState.DRAINING:
        machine.drain()
    assert machine.state is state
    return machine


def peers_number(role: Role, which: int = 0) -> int:
    return 2 * which + (0 if role is Role.DIALLER else 1)


@pytest.mark.parametrize(
    ("role", "state"), [(role, state) for role in Role for state in LinkState], ids=lambda value: value.value
)
def test_a_message_is_accepted_or_closes_the_link_as_in_the_table(role: Role, state: LinkState) -> None:
    for message in every_message(session=peers_number(role)):
        machine = machine_in(role, state)
        if type(message) is type(opening(0)):
            message = opening(peers_number(role, which=1))
        effects = machine.received(encode(message), 1.0)
        following = NEXT[role].get((state, TRIGGERS.get(type(message), Trigger.TRAFFIC)))
        if state is LinkState.CLOSED:
            assert effects == []
        elif following is not None and isinstance(message, SIGNED):
            assert machine.state is LinkState.CLOSED, "the table allows it now, but nobody has signed it"
            [end] = [effect for effect in effects if isinstance(effect, Disconnected)]
            assert end.code == CloseCode.SERVER_KEY_CHANGED
        elif following is None:
            assert machine.state is LinkState.CLOSED
            assert [effect.code for effect in effects if isinstance(effect, Disconnected)] == [
                CloseCode.UNEXPECTED_MESSAGE
            ]
        elif machine.state is not following:  # the only session ended while draining
            assert (state, machine.state) == (LinkState.DRAINING, LinkState.CLOSED)
            assert effects[-1] == Disconnected(CloseCode.DRAINED, "", effects[-1].reason, by_peer=False)  # type: ignore[union-attr]  # just compared
        else:
            assert machine.state is following
            assert not any(isinstance(effect, Disconnected) for effect in effects)


def test_every_message_has_a_trigger_and_every_state_a_way_to_close() -> None:
    assert {type(message) for message in every_message()} == {*CONTROL_MESSAGES, *STRATEGY_MESSAGES}
    for role in Role:
        for state in LinkState:
            assert ((state, Trigger.CLOSE) in NEXT[role]) == (state is not LinkState.CLOSED)
            assert not any(at is LinkState.CLOSED for at, _ in NEXT[role])


def test_only_what_leads_somewhere_is_in_the_table() -> None:
    for role, other in itertools.permutations(Role):
        reachable = {LinkState.OPENING}
        for _ in LinkState:
            reachable |= {following for (state, _), following in NEXT[role].items() if state in reachable}
        assert reachable == set(LinkState)
        assert NEXT[role] != NEXT[other]


@pytest.mark.parametrize("role", Role)
def test_nothing_is_sent_before_the_handshake_or_after_the_end(role: Role) -> None:
    with pytest.raises(LocalProtocolError):
        machine_in(role, LinkState.OPENING).send(opening(1))
    with pytest.raises(LinkClosed):
        machine_in(role, LinkState.CLOSED).send(opening(1))


@pytest.mark.parametrize("role", Role)
def test_a_closed_link_emits_no_effects(role: Role) -> None:
    machine = machine_in(role, LinkState.CLOSED)
    assert machine.received(b"\xc1", 1.0) == []
    assert machine.tick(99.0) == []
    assert machine.drain() == []
    assert machine.close(CloseCode.CLOSING) == []
    assert machine.connection_lost(1006) == []
    assert machine.authenticated(LAPTOP.public_key, 1.0) == []


def test_a_cloud_authenticates_before_anything_else() -> None:
    machine = machine_in(Role.LISTENER, LinkState.CHALLENGED)
    assert [type(effect) for effect in machine.received(encode(PROOF), 0.1)] == [Authenticate]
    for state in (LinkState.OPENING, LinkState.CHALLENGED, LinkState.READY):
        with pytest.raises(LocalProtocolError):
            machine_in(Role.LISTENER, state).authenticated(LAPTOP.public_key, 0.1)
