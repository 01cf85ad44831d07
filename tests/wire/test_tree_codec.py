"""Encoding of tree nodes: lossless, compact, validated."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads import FOLLOWS, MAX_NODES, YOURS, BitWriter, EncodedNodes, pack_nodes, unpack_nodes

VOCAB = 151_936
untimed = settings(deadline=None)


@st.composite
def messages(draw: st.DrawFn) -> EncodedNodes:
    first = draw(st.integers(0, 100_000))
    count = draw(st.integers(1, 24))
    anchored = first == 0 or draw(st.booleans())
    tokens = st.integers(0, VOCAB - 1)
    choices = draw(st.none() | st.lists(st.just(YOURS) | tokens, min_size=count, max_size=count))
    numbers = st.lists(st.integers(-(2**30), 2**30), min_size=count, max_size=count)
    scores = draw(st.none() | numbers)
    parents: list[int] = []
    edges: list[int] = []
    for node in range(first, first + count):
        if node == first and anchored:
            parents.append(-1)
            edges.append(0)
            continue
        parent = draw(st.sampled_from([node - 1, draw(st.integers(0, node - 1))]))
        chosen = YOURS if choices is None or parent < first else choices[parent - first]
        own = [] if choices is None else [FOLLOWS] if chosen == YOURS else [chosen]
        parents.append(parent)
        edges.append(draw(st.sampled_from([draw(tokens), YOURS, *own])))
    return EncodedNodes(
        position=draw(st.integers(0, 2**31 - 1)) if anchored else None,
        level=draw(st.integers(0, 2)) if choices is None else 0,
        first=first,
        parents=tuple(parents),
        tokens=tuple(edges),
        choices=None if choices is None else tuple(choices),
        scores=None if scores is None else tuple(scores),
    )


@untimed
@given(messages())
def test_decoded_nodes_equal_the_encoded_ones(nodes: EncodedNodes) -> None:
    assert unpack_nodes(pack_nodes(nodes), VOCAB) == nodes


@untimed
@given(st.binary(max_size=40))
def test_any_bytes_are_nodes_or_a_fault_of_the_peer(data: bytes) -> None:
    try:
        nodes = unpack_nodes(data, 1000)
    except RemoteProtocolError as error:
        assert error.close_code == CloseCode.BAD_FRAME
        return
    assert pack_nodes(nodes) == data, "one spelling"
    assert all(token in (FOLLOWS, YOURS) or 0 <= token < 1000 for token in nodes.tokens)


@untimed
@given(messages(), st.data())
def test_a_changed_byte_gives_other_nodes_or_a_fault(nodes: EncodedNodes, data: st.DataObject) -> None:
    packed = bytearray(pack_nodes(nodes))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(RemoteProtocolError):
        assert pack_nodes(unpack_nodes(bytes(packed), VOCAB)) == packed


CHAIN = EncodedNodes(None, level=0, first=415, parents=(414,), tokens=(FOLLOWS,), choices=(102_345,))


def test_a_node_of_a_chain_takes_six_bytes_and_further_ones_little_more_than_their_choice() -> None:
    assert len(pack_nodes(CHAIN)) == 6
    assert len(pack_nodes(replace(CHAIN, tokens=(977,)))) == 8, "an edge that is no choice known"
    choices = (11, 102_345, 977, 30_000, 12)
    chain = replace(CHAIN, parents=(414, 415, 416, 417, 418), tokens=(FOLLOWS, *choices[:-1]), choices=choices)
    assert 8 * len(pack_nodes(chain)) <= 25 + 5 * (1 + 1 + 18) + 8
    assert unpack_nodes(pack_nodes(chain), VOCAB) == chain


def test_what_the_receiver_has_chosen_takes_a_bit_in_place_of_a_token() -> None:
    assert len(pack_nodes(replace(CHAIN, choices=(YOURS,)))) == 4
    assert len(pack_nodes(replace(CHAIN, tokens=(YOURS,)))) == len(pack_nodes(CHAIN))


def test_the_weight_of_a_sides_documents_takes_nine_bits_beside_a_choice() -> None:
    for score in (-128, -65, 0, 127):  # log h from -8 to 8
        assert len(pack_nodes(replace(CHAIN, scores=(score,)))) <= len(pack_nodes(CHAIN)) + 2
    assert unpack_nodes(pack_nodes(replace(CHAIN, scores=(-300,))), VOCAB).scores == (-300,)


def test_the_maximum_of_nodes_is_encoded_and_one_more_is_refused() -> None:
    def of(count: int) -> EncodedNodes:
        parents = tuple(range(-1, count - 1))
        return EncodedNodes(0, 0, 0, parents, (0, *[5] * (count - 1)), (5,) * count)

    assert unpack_nodes(pack_nodes(of(MAX_NODES)), 6) == of(MAX_NODES)
    with pytest.raises(ValueError, match="257 nodes"):
        pack_nodes(of(MAX_NODES + 1))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (replace(CHAIN, parents=(415,)), "not an earlier one"),
        (replace(CHAIN, parents=(-1,)), "not the anchor"),
        (replace(CHAIN, tokens=(-3,)), "outside the vocabulary"),
        (replace(CHAIN, choices=(FOLLOWS,)), "choice"),
        (replace(CHAIN, parents=(414, 415), tokens=(FOLLOWS, FOLLOWS), choices=(1, 2)), "follows a choice"),
        (replace(CHAIN, choices=(1, 2)), "1 nodes"),
        (replace(CHAIN, level=1), "no level 1"),
        (replace(CHAIN, position=-1, parents=(-1,), tokens=(0,)), "out of range"),
        (replace(CHAIN, scores=(1, 2)), "scores"),
        (EncodedNodes(0, 0, 0, (), (), None), "0 nodes"),
    ],
)
def test_inconsistent_nodes_are_not_encoded(bad: EncodedNodes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pack_nodes(bad)


def bits(*numbers: tuple[int, int]) -> bytes:
    """Numbers with their widths, the first in the lowest bits."""
    writer = BitWriter()
    for number, width in numbers:
        writer.bits(number, width)
    return writer.to_bytes()


# One node, anchored or not, with choices, tokens of 16 bits, id 0.
ANCHORED, HANGING = ((0, 3), (0b011, 3), (0, 2), (0, 7)), ((0, 3), (0b010, 3), (0, 2), (0, 7))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "missing"),
        (bits((0, 3), (0b011, 3)), "ends within"),
        (bits(*ANCHORED, (0, 7), (0, 1), (5, 16), (1, 8)), "not packed as"),
        (bits(*ANCHORED, (64, 7), (0, 7), (0, 1), (5, 16)), "not packed as"),
        (bits(*ANCHORED, *[(127, 7)] * 6), "too large"),
        (bits(*[(7, 3)] * 6), "in one message"),
        (bits((0, 3), (0b001, 3), (3, 2), (0, 2), (0, 7), (0, 7)), "no level 3"),
        (bits(*ANCHORED, (0, 7), (0, 1), (100, 16)), "choice"),
        (bits(*HANGING, (1, 1), (1, 1), (0, 1), (5, 16)), "without parent"),
        (bits(*HANGING, (0, 1), (0, 4), (1, 1), (0, 1), (5, 16)), "not an earlier one"),
    ],
)
def test_hostile_bytes_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        unpack_nodes(data, 100)
