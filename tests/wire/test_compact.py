"""The short form of a message comes back as it was, is written in one way alone, and anything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RemoteProtocolError
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode, encode
from paceline.wire.payloads.varints import encode_tokens
from paceline.wire.verify_messages import MAX_CHAIN, DraftChain

assert STRATEGIES, "its messages are registered"

counts = st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 2))
chains = st.builds(
    lambda session, epoch, base, offset, tokens: DraftChain(session, epoch, base, offset, encode_tokens(tokens)),
    st.one_of(st.integers(0, 300), st.integers(0, 2**53 - 1)),
    counts,
    st.integers(0, 2**30),
    st.integers(0, MAX_CHAIN - 20),
    st.lists(st.integers(0, 151_935), max_size=20),
)


@given(chains)
def test_every_message_comes_back_as_it_was_and_is_never_longer(message: DraftChain) -> None:
    data = encode(message)
    assert decode(data, vocab_size=151_936) == message
    assert len(data) <= len(msgspec.msgpack.encode(message))
    assert decode(msgspec.msgpack.encode(message)) == message, "the array is understood too"


@given(st.binary(max_size=24).map(lambda rest: b"\x04" + rest) | st.binary(min_size=1, max_size=24))
def test_what_is_decoded_is_written_so_and_the_rest_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except RemoteProtocolError:
        return
    if isinstance(message, DraftChain) and data[0] < 0x80:
        assert encode(message) == data


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\x7c\x01\x01", "no message has the code 31"),
        (b"\x04\x01", "end within a number"),
        (b"\x04\x01\x80\x00", "more bytes than it needs"),
        (b"\x05\x01\x00\x01", "0 is written"),
        (b"\x06\x01\x01\xff\x7f", r"\$\.offset"),
        (b"\x04\x01\x01\xff", "end within a number"),
        (b"\x04\x01\xff\xff\xff\xff\xff\x01", "more bytes than it needs"),
    ],
)
def test_faults_are_told(data: bytes, fault: str) -> None:
    with pytest.raises(RemoteProtocolError, match=fault):
        decode(data)


def test_a_message_of_two_drafts_takes_three_bytes_beside_them() -> None:
    tokens = encode_tokens([500, 9_000])
    assert len(encode(DraftChain(41, 0, 100, 0, tokens))) == 3 + len(tokens) == 7
