"""The short form of a message comes back as it was, is written in one way alone, and anything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RemoteProtocolError
from paceline.strategies.registry import STRATEGIES
from paceline.wire import payloads
from paceline.wire.codec import decode, encode
from paceline.wire.messages import DistPayload, Drafts, Targets
from paceline.wire.payloads import EncodedNodes, decode_places, encode_places, encode_tokens, pack_nodes
from paceline.wire.verify_messages import MAX_CHAIN, DraftChain

assert STRATEGIES, "its messages are registered"

IDS = st.integers(0, 151_935)
PLACES = st.tuples(IDS, st.none() | IDS).filter(lambda place: place[0] != place[1])
counts = st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 2))
chains = st.builds(
    DraftChain,
    st.one_of(st.integers(0, 300), st.integers(0, 2**53 - 1)),
    counts,
    st.integers(0, 2**30),
    st.integers(0, MAX_CHAIN - 20),
    st.lists(PLACES, max_size=20).map(encode_places),
)


@given(chains)
def test_every_message_comes_back_as_it_was_and_is_never_longer(message: DraftChain) -> None:
    data = encode(message)
    assert decode(data, vocab_size=151_936) == message
    assert len(data) <= len(msgspec.msgpack.encode(message))
    assert decode(msgspec.msgpack.encode(message)) == message, "the array is understood too"


FIRST = st.sampled_from([b"", b"\x04", b"\x08", b"\x09", b"\x0c", b"\x0d", b"\x0e", b"\x0f"])


@given(FIRST, st.binary(min_size=1, max_size=24))
def test_what_is_decoded_is_written_so_and_the_rest_refused(first: bytes, rest: bytes) -> None:
    data = first + rest
    try:
        message = decode(data)
    except RemoteProtocolError:
        return
    if isinstance(message, DraftChain | Targets) and data[0] < 0x80:
        assert encode(message) == data


TWO = encode_places([(1, None), (2, None)])


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (encode(DraftChain(0, 0, 0, 0, encode_places([(1000, None)]))), "outside the vocabulary"),
        (encode(DraftChain(0, 0, 0, MAX_CHAIN - 1, TWO)), f"more than {MAX_CHAIN} tokens"),
        (encode(DraftChain(0, 0, 0, 0, TWO, probs=b"a")), "probabilities for 2 tokens"),
        (encode(DraftChain(0, 0, 0, 0, TWO, dists=[b"\0"])), "1 distributions for 2 tokens"),
        (encode(DraftChain(0, 0, 1, 0, TWO, recovered=1000)), r"\$\.recovered"),
        (encode(Targets(0, 0, 0, [1, 1], b"", b"", [DistPayload(b"", b"")])), "1 distributions for 2 tokens"),
        (b"\x7c\x01\x01", "no message has the code 31"),
        (b"\x04\x01", "end within a number"),
        (b"\x04\x01\x80\x00", "more bytes than it needs"),
        (b"\x05\x01\x00\x01", "0 is written"),
        (b"\x06\x01\x01\xff\x7f", r"\$\.offset"),
        (b"\x0a\x01\x01\x00", "distributions end too early"),
        (b"\x0a\x01\x01\x00\x02\x00\x00", "distributions end too early"),
        (b"\x0c\x01\x08\x09", "lanes of some tokens alone"),
        (b"\x0c\x01\x0c", "in two ways"),
        (b"\x0c\x01\x80", "end within a number"),
        (b"\x0c\x01\xf8\xff\xff\xff\x7f", r"\$\.tokens"),
    ],
)
def test_faults_are_told(data: bytes, fault: str) -> None:
    with pytest.raises(RemoteProtocolError, match=fault):
        decode(data, vocab_size=1000)


PARTS = st.builds(DistPayload, st.binary(max_size=200), st.binary(max_size=200))
TREES = st.builds(
    lambda start, first, tokens, choices: pack_nodes(
        EncodedNodes(start, 0, first, (-1, *[first] * len(tokens)), (0, *tokens), tuple(choices[: len(tokens) + 1]))
    ),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
    st.lists(IDS, max_size=7, unique=True),
    st.lists(IDS, min_size=8, max_size=8),
)


def _targets(session: int, epoch: int, start: int, each: list[tuple[int, int]], *, laned: bool) -> Targets:
    """Tokens with lanes, or with sources."""
    marks = bytes(mark for _, mark in each)
    if laned:
        return Targets(session, epoch, start, [token for token, _ in each], marks)
    return Targets(
        session, epoch, start, [0 if mark else token for token, mark in each], b"", marks.strip(b"\0") and marks
    )


targets = st.lists(st.tuples(IDS, st.integers(0, 2)), max_size=200).flatmap(
    lambda each: st.builds(
        lambda session, epoch, start, laned: _targets(session, epoch, start, each, laned=laned),
        st.integers(0, 300),
        counts,
        st.integers(0, 2**30),
        st.booleans(),
    )
)


with_dists = st.lists(PARTS, min_size=1, max_size=6).map(
    lambda dists: Drafts(
        3, 0, pack_nodes(EncodedNodes(0, 0, 0, tuple(range(-1, len(dists) - 1)), (0,) * len(dists), None)), dists
    )
)


@given(st.builds(Drafts, st.integers(0, 300), counts, TREES) | with_dists | targets)
def test_drafts_and_targets_come_back_and_are_shorter(message: Drafts | Targets) -> None:
    data = encode(message)
    assert decode(data, vocab_size=151_936) == message
    assert len(data) < len(msgspec.msgpack.encode(message))
    assert decode(msgspec.msgpack.encode(message)) == message, "the array is understood too"


def test_a_last_number_is_refused_where_there_is_none() -> None:
    with pytest.raises(RemoteProtocolError, match="no last number"):
        payloads.unpack(b"\x0a\x01", 0)


@pytest.mark.parametrize(
    "wrong",
    [
        Targets(2, 0, 1, [5], b"", b"\x01"),
        Targets(2, 0, 1, [5], b"", b"\x00"),
        Targets(2, 0, 1, [0], b"", b"\x03"),
        Targets(2, 0, 1, [0], b"\x00", b"\x01"),
        Targets(2, 0, 1, [0], b"", b"\x01\x01"),
    ],
)
def test_sources_that_are_none_are_refused_in_either_form(wrong: Targets) -> None:
    with pytest.raises(RemoteProtocolError, match=r"\$\.sources"):
        decode(encode(wrong))


def test_tokens_take_few_bytes_beside_three_of_their_message() -> None:
    """One that the receiver knows takes one, one of a large vocabulary three with its lane, a distribution two beside
    its ids and probabilities."""
    assert len(encode(Targets(41, 0, 100, [0, 0, 0], b"", b"\x01\x02\x01"))) == 3 + 3
    assert len(encode(Targets(41, 0, 100, [151_935, 70_000], b"\x01\x02"))) == 3 + 2 * 3
    nodes = pack_nodes(EncodedNodes(None, 0, 500, (499,), (77_000,), None))
    assert len(encode(Drafts(41, 0, nodes, [DistPayload(b"\x05", b"\x00\x70")]))) == 3 + len(nodes) + 2 + 3
    places = encode_places([(500, None), (8_000, None)])
    assert len(encode(DraftChain(41, 0, 100, 0, places))) == 3 + len(places) == 7


@given(st.lists(PLACES, max_size=20))
def test_places_come_back_and_a_second_guess_takes_the_bytes_of_a_draft(places: list[tuple[int, int | None]]) -> None:
    assert decode_places(encode_places(places)) == places
    real = [(token + 100_000, None if second is None else second + 100_000) for token, second in places]
    guesses = sum(second is not None for _, second in places)
    assert len(encode_places(real)) == 3 * (len(places) + guesses)


@given(st.binary(max_size=24))
def test_places_are_written_in_one_way_alone(data: bytes) -> None:
    try:
        places = decode_places(data)
    except RemoteProtocolError:
        return
    assert encode_places(places) == data


@pytest.mark.parametrize("numbers", [[131], [131, 133], [131, 130], [130, 131]])
def test_a_second_guess_that_is_missing_or_the_draft_itself_is_refused(numbers: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match="no second guess of its own"):
        decode_places(encode_tokens(numbers))
