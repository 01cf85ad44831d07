from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import LinkClosed, LinkError, LocalProtocolError
from paceline.runtime.identity import verify
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import decode, encode
from paceline.wire.effects import Connected, Deliver, Disconnected, Effect, TickAt, Transmit
from paceline.wire.identity import ListenerHandshake
from paceline.wire.link import HEARTBEAT_S, MAX_SESSIONS, LinkMachine, LinkState, Role
from paceline.wire.messages import VERSION, Challenge, CloseSession, Hello, Introduction, Message, Ping, Pong
from tests.wire.identities import (
    CLOUD,
    DEVICE,
    LAPTOP,
    SERVER,
    challenged,
    checked,
    claim_of,
    cloud_end,
    device_end,
    shake_hands,
)
from tests.wire.samples import CHALLENGE, closing, draft, every_message, found, have, opening, targets

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

replace = msgspec.structs.replace


def sent(effects: list[Effect]) -> list[Message]:
    return [decode(effect.data) for effect in effects if isinstance(effect, Transmit)]


def delivered(effects: list[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Deliver)]


def down(effects: list[Effect]) -> Disconnected:
    [found] = [effect for effect in effects if isinstance(effect, Disconnected)]
    assert effects[-1] is found
    return found


def ready(role: Role = Role.LISTENER, now: float = 0.0) -> LinkMachine:
    device, cloud = LinkMachine(device_end(), vocab_size=100), LinkMachine(cloud_end(), vocab_size=100)
    shake_hands(device, cloud, now)
    machine = device if role is Role.DIALLER else cloud
    assert machine.state is LinkState.READY
    return machine


# ---- handshake ------------------------------------------------------------------------------------------------------
def test_two_ends_introduce_themselves_and_agree_on_strategies() -> None:
    device, cloud = LinkMachine(device_end()), LinkMachine(cloud_end())
    at_device, at_cloud = shake_hands(device, cloud)
    common = ["autoregressive", "aggregate"]
    assert Connected(DEVICE) in at_cloud
    assert Connected(replace(CLOUD, strategies=common)) in at_device
    assert set(device.handshake.strategies) == set(cloud.handshake.strategies) == set(common)
    assert (device.peer, cloud.peer) == (replace(CLOUD, strategies=common), DEVICE)
    assert cloud.handshake.device == "laptop"


def test_models_with_different_vocabularies_are_linked_and_write_no_answer_together() -> None:
    device, cloud = LinkMachine(device_end(replace(DEVICE, tokenizer="other"))), LinkMachine(cloud_end())
    shake_hands(device, cloud)
    assert device.peer is not None and cloud.peer is not None
    assert device.handshake.strategies == cloud.handshake.strategies == ()


@pytest.mark.parametrize("refusal", [CloseCode.BAD_CREDENTIAL, CloseCode.REVOKED, CloseCode.KEY_REPLACED])
def test_a_device_that_is_not_admitted_receives_advice(refusal: CloseCode) -> None:
    device, cloud = LinkMachine(device_end()), LinkMachine(cloud_end())
    cloud.received(challenged(device, cloud), 0.1)
    effects = cloud.authenticated(refusal, 0.2)
    assert down(effects).code == refusal
    assert "paceline devices add" in down(effects).reason
    assert cloud.peer is None and sent(effects) == []


@pytest.mark.parametrize(
    ("introduction", "detail"),
    [
        (replace(DEVICE, strategies=["telepathy"]), ""),
        (replace(DEVICE, strategies=[], tokenizer="other"), "large and small have different vocabularies"),
    ],
)
def test_a_cloud_refuses_an_incompatible_device(introduction: Introduction, detail: str) -> None:
    device, cloud = LinkMachine(device_end(introduction)), LinkMachine(cloud_end())
    claim = claim_of(cloud.received(challenged(device, cloud), 0.1))
    effects = cloud.authenticated(checked(claim), 0.2)
    assert (down(effects).code, down(effects).detail) == (CloseCode.NO_COMMON_STRATEGY, detail)
    assert sent(effects) == []


class Lenient(ListenerHandshake):
    """A cloud that welcomes any device."""

    def _meet(self, introduction: bytes, missing: str = "") -> Introduction | None:  # noqa: ARG002  # as there
        assert introduction and self.introduction is not None
        self.strategies = tuple(self.introduction.strategies)
        return self.introduction


def test_a_device_refuses_an_incompatible_cloud() -> None:
    introduction = replace(CLOUD, strategies=["telepathy"])
    lenient = Lenient(introduction, key=SERVER, binding=SERVER.public_key, nonce=bytes(32), verify=verify)
    effects, _ = shake_hands(LinkMachine(device_end()), LinkMachine(lenient))
    assert down(effects).code == CloseCode.NO_COMMON_STRATEGY
    assert sent(effects) == []


def test_a_device_names_the_other_version_of_a_cloud() -> None:
    device = LinkMachine(device_end())
    device.connection_made(0.0)
    effects = device.received(encode(replace(CHALLENGE, version=VERSION + 1)), 0.1)
    assert (down(effects).code, sent(effects)) == (CloseCode.VERSION_MISMATCH, [])


@pytest.mark.parametrize(
    ("version", "rest"),
    [(0, ["laptop", "secret", "t", "m", "n", [], 0]), (VERSION + 1, ["a field", {"of": "the future"}])],
)
def test_another_version_is_named_even_in_an_unknown_hello(version: int, rest: list[object]) -> None:
    cloud = LinkMachine(cloud_end())
    cloud.connection_made(0.0)
    effects = cloud.received(msgspec.msgpack.encode(["hello", version, *rest]), 0.1)
    assert (down(effects).code, sent(effects)) == (CloseCode.VERSION_MISMATCH, [])
    assert f"who dialled speaks {version}, who listens {VERSION}. The two sides" in down(effects).reason


@pytest.mark.parametrize("role", Role)
def test_a_silent_peer_is_dropped_after_five_seconds(role: Role) -> None:
    machine = LinkMachine(device_end() if role is Role.DIALLER else cloud_end())
    machine.connection_made(10.0)
    assert machine.tick(14.9) == [TickAt(15.0)]
    assert down(machine.tick(15.0)).code == CloseCode.HANDSHAKE_TIMEOUT


def test_the_whole_handshake_is_bounded_by_its_limit() -> None:
    cloud = LinkMachine(cloud_end())
    cloud.received(challenged(LinkMachine(device_end()), cloud), 4.9)
    assert down(cloud.tick(5.0)).code == CloseCode.HANDSHAKE_TIMEOUT
    assert cloud.authenticated(LAPTOP.public_key, 5.1) == []


# ---- heartbeat ------------------------------------------------------------------------------------------------------
def test_a_silent_peer_is_taken_for_dead_after_two_heartbeats() -> None:
    machine = ready(now=0.0)  # pings at 0
    assert sent(machine.tick(3.0)) == [Ping(sent_at=3.0)]  # one missed
    assert down(machine.tick(6.0)).code == CloseCode.HEARTBEAT_LOST  # two


def test_a_heartbeat_tells_how_many_documents_there_are_now() -> None:
    near, far, held = LinkMachine(device_end()), LinkMachine(cloud_end()), [7]
    shake_hands(near, far)
    near.documents = lambda: held[0]
    near.received(encode(sent(far.received(encode(sent(near.tick(3.0))[0]), 3.0))[0]), 3.0)
    assert far.peer is not None and far.peer.documents == 7
    held[0] = 0
    far.received(encode(sent(near.tick(6.0))[0]), 6.0)
    assert far.peer.documents == 0
    far.received(encode(Ping(sent_at=7.0)), 7.0)
    assert far.peer.documents == 0, "as it said last"


@pytest.mark.parametrize("message", [Pong(sent_at=0.0, held_s=0.0), Ping(sent_at=1.0), have(1)])
def test_any_frame_counts_as_a_heartbeat(message: Message) -> None:
    machine = ready(now=0.0)
    machine.received(encode(opening(1)), 0.0)
    for beat in range(1, 20):
        machine.received(encode(message), HEARTBEAT_S * beat - 0.1)
        assert not any(isinstance(effect, Disconnected) for effect in machine.tick(HEARTBEAT_S * beat))


def test_a_machine_that_slept_gives_the_peer_time_to_answer() -> None:
    machine = ready(now=0.0)
    machine.received(encode(Pong(sent_at=0.0, held_s=0.0)), 0.1)
    assert sent(machine.tick(3600.0)) == [Ping(sent_at=3600.0)]
    machine.received(encode(Pong(sent_at=3600.0, held_s=0.0)), 3600.1)
    assert not any(isinstance(effect, Disconnected) for effect in machine.tick(3603.0))


def test_a_ping_is_answered_at_once_with_its_own_time() -> None:
    assert sent(ready().received(encode(Ping(sent_at=123.5)), 1.0)) == [Pong(sent_at=123.5, held_s=0.0)]


def test_round_trips_are_smoothed_without_the_peers_own_delay() -> None:
    machine = ready(now=0.0)
    assert machine.clock.rtt is None
    machine.received(encode(Pong(sent_at=0.0, held_s=0.25)), 0.5)
    assert machine.clock.rtt == 0.25
    machine.tick(3.0)
    machine.received(encode(Pong(sent_at=3.0, held_s=0.0)), 3.5)
    assert machine.clock.rtt == 0.25 + 0.25 / 8


@pytest.mark.parametrize("pong", [Pong(sent_at=-5.0, held_s=0.0), Pong(sent_at=0.0, held_s=1e9), Pong(0.0, -1e9)])
def test_a_false_pong_cannot_make_a_round_trip_negative_or_longer(pong: Pong) -> None:
    machine = ready(now=0.0)
    machine.received(encode(pong), 0.5)
    machine.received(encode(pong), 0.7)
    assert machine.clock.rtt in (None, 0.0, 0.5)


# ---- sessions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("role", "own", "peers"), [(Role.DIALLER, [1, 3, 5], 0), (Role.LISTENER, [0, 2, 4], 1)])
def test_each_side_numbers_its_own_sessions(role: Role, own: list[int], peers: int) -> None:
    machine = ready(role)
    assert [machine.sessions.allocate() for _ in own] == own
    for number in own:
        assert sent(machine.send(opening(number))) == [opening(number)]
    assert delivered(machine.received(encode(opening(peers)), 1.0)) == [opening(peers)]
    with pytest.raises(LocalProtocolError):
        machine.send(opening(peers + 2))
    with pytest.raises(LocalProtocolError):
        machine.send(opening(own[0]))


def test_a_new_session_has_a_number_above_those_of_both_sides() -> None:
    """So that both sides know which of two sessions came first, whoever opened them."""
    machine = ready(Role.LISTENER)
    first = machine.sessions.allocate()
    machine.send(opening(first))
    machine.received(encode(opening(7)), 1.0)
    assert (first, machine.sessions.allocate(), machine.sessions.allocate()) == (0, 8, 10)
    machine.send(opening(10))
    machine.received(encode(opening(9)), 1.0)  # sent before that one arrived
    assert machine.sessions.allocate() == 12


def test_a_peer_s_number_leaves_this_side_numbers_that_can_be_sent() -> None:
    machine = ready(Role.LISTENER)
    machine.received(encode(opening(2**20 - 1)), 1.0)
    message = opening(machine.sessions.allocate())
    assert sent(machine.send(message)) == [message] and message.session == 2**20


def test_messages_of_an_open_session_go_through_both_ways() -> None:
    machine = ready()
    machine.received(encode(opening(1)), 1.0)
    for message in (draft(1), targets(1), have(1), found(1)):
        assert delivered(machine.received(encode(message), 1.0)) == [message]
        assert sent(machine.send(message)) == [message]
    assert delivered(machine.received(encode(closing(1)), 1.0)) == [closing(1)]
    assert 1 not in machine.sessions


@pytest.mark.parametrize("ended_by", ["us", "peer"])
def test_late_messages_of_an_ended_session_are_dropped(ended_by: str) -> None:
    machine = ready()
    machine.received(encode(opening(1)), 1.0)
    if ended_by == "us":
        machine.send(closing(1))
    else:
        machine.received(encode(closing(1)), 1.0)
    assert machine.received(encode(draft(1)), 1.1) == []
    assert machine.received(encode(closing(1)), 1.1) == []
    assert machine.send(targets(1)) == []
    assert machine.state is LinkState.READY


@pytest.mark.parametrize(
    "message",
    [draft(3), closing(2), have(0), opening(0), opening(1), opening(2**53 - 1), opening(2**21 + 1)],
    ids=["never opened", "never opened by us", "ours but never opened", "our number", "opened twice", "last", "far"],
)
def test_an_invalid_session_number_closes_the_link(message: Message) -> None:
    machine = ready()
    machine.received(encode(opening(1)), 1.0)
    assert down(machine.received(encode(message), 1.1)).code == CloseCode.BAD_SESSION


def test_a_message_of_an_unopened_session_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError):
        ready().send(draft(7))


def test_sessions_of_the_peer_beyond_the_limit_are_refused() -> None:
    machine = ready()
    for number in range(MAX_SESSIONS):
        assert delivered(machine.received(encode(opening(2 * number + 1)), 1.0))
    effects = machine.received(encode(opening(2 * MAX_SESSIONS + 1)), 1.0)
    [refusal] = sent(effects)
    assert isinstance(refusal, CloseSession)
    assert refusal.reason.startswith("refused: 256 sessions")
    assert delivered(effects) == []
    assert delivered(machine.received(encode(have(1)), 1.0))


def test_this_side_opens_no_sessions_beyond_the_limit() -> None:
    machine = ready()
    for _ in range(MAX_SESSIONS):
        machine.send(opening(machine.sessions.allocate()))
    with pytest.raises(LinkError, match="256 sessions"):
        machine.send(opening(machine.sessions.allocate()))


# ---- ending ---------------------------------------------------------------------------------------------------------
def test_draining_lets_open_sessions_end_and_refuses_new_ones() -> None:
    machine = ready()
    machine.received(encode(opening(1)), 1.0)
    assert len(sent(machine.drain())) == 1
    assert machine.drain() == []
    assert not machine.accepting
    with pytest.raises(LinkClosed):
        machine.send(opening(0))
    [refusal] = sent(machine.received(encode(opening(3)), 1.1))
    assert refusal == closing(3, "refused: one side is going away")
    assert delivered(machine.received(encode(have(1)), 1.2)) == [have(1)]
    effects = machine.send(closing(1))
    assert sent(effects) == [closing(1)]
    assert down(effects).code == CloseCode.DRAINED


def test_a_link_without_sessions_drains_at_once() -> None:
    assert down(ready().drain()).code == CloseCode.DRAINED
    fresh = LinkMachine(cloud_end())
    fresh.connection_made(0.0)
    assert down(fresh.drain()).code == CloseCode.DRAINED


def test_the_side_that_was_asked_to_drain_waits_for_the_other_to_close() -> None:
    device, cloud = ready(Role.DIALLER), ready(Role.LISTENER)
    [ask] = [effect for effect in cloud.drain() if isinstance(effect, Transmit)]
    assert device.received(ask.data, 1.0) == []
    assert (device.state, device.accepting) == (LinkState.DRAINING, False)
    end = down(device.connection_lost(CloseCode.DRAINED, ""))
    assert end.by_peer
    assert "going away" in end.reason


# ---- fuzz -----------------------------------------------------------------------------------------------------------
frames = st.binary(max_size=40) | st.sampled_from(
    [encode(message) for n in (0, 1, 2, 3) for message in every_message(n)]
)
steps = st.lists(
    st.tuples(st.sampled_from(["receive", "receive", "receive", "tick", "admit", "drain"]), frames), max_size=30
)


@untimed
@given(st.sampled_from(Role), steps)
def test_no_sequence_of_frames_breaks_the_machine(role: Role, script: list[tuple[str, bytes]]) -> None:
    machine = LinkMachine(device_end() if role is Role.DIALLER else cloud_end(), vocab_size=100)
    effects = machine.connection_made(0.0)
    asked = False
    for now, (what, frame) in enumerate(script):
        match what:
            case "receive":
                step = machine.received(frame, now)
            case "tick":
                step = machine.tick(now)
            case "drain":
                step = machine.drain()
            case _:
                step = machine.authenticated(LAPTOP.public_key, now) if asked else []
        asked = machine.state is LinkState.AUTHENTICATING
        effects += step
    downs = [effect for effect in effects if isinstance(effect, Disconnected)]
    assert len(downs) == (machine.state is LinkState.CLOSED)
    assert not downs or effects[-1] is downs[0]
    assert len(machine.sessions) <= 2 * MAX_SESSIONS
    assert sum(isinstance(effect, Connected) for effect in effects) <= 1
    if not any(isinstance(effect, Connected) for effect in effects):
        first = Hello if role is Role.DIALLER else Challenge
        assert all(isinstance(message, first) for message in sent(effects)), "a stranger is told no more"
