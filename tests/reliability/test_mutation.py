"""The generator of hostile messages makes every message of the protocol, legal and faulty, and the same from a seed."""

from __future__ import annotations

import random

from paceline.errors import RemoteProtocolError
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode, decode_part
from paceline.wire.messages import CONTROL_MESSAGES, STRATEGY_MESSAGES, OpenSession, SessionMessage
from paceline.wire.payloads import FIRST_OF_ARRAY
from paceline.wire.verify_messages import VERIFY_MESSAGES
from tests.reliability.mutated_drafts import Aim
from tests.reliability.mutation import KINDS, Mutator, is_legal

VOCAB = 257


def test_messages_of_every_registered_strategy_are_among_them() -> None:
    assert {*VERIFY_MESSAGES, *STRATEGY_MESSAGES, *CONTROL_MESSAGES} <= set(KINDS)
    assert {kind for strategy in STRATEGIES.values() for kind in strategy.messages} <= set(KINDS)


def test_openings_name_every_strategy_with_options_it_accepts_and_others() -> None:
    mutator = Mutator(random.Random(1), vocab_size=VOCAB)
    fitting, other = set[str](), set[str]()
    for _ in range(400):
        opening = decode(mutator.legal(OpenSession, Aim(session=2)), vocab_size=VOCAB)
        assert isinstance(opening, OpenSession)
        if opening.strategy not in STRATEGIES:
            continue
        try:
            decode_part(opening.options, STRATEGIES[opening.strategy].options)
            fitting.add(opening.strategy)
        except RemoteProtocolError:
            other.add(opening.strategy)
    assert fitting == other == set(STRATEGIES)


def test_sequences_are_those_of_their_seed_and_vary() -> None:
    def drawn(seed: int) -> list[list[bytes]]:
        mutator = Mutator(random.Random(seed), vocab_size=VOCAB)
        return [mutator.sequence(Aim(session=2), faulty=number % 2 == 0) for number in range(200)]

    mutator = Mutator(random.Random(3), vocab_size=VOCAB)
    assert not any(is_legal(mutator.fault(kind, Aim(session=2)), VOCAB) for kind in KINDS)
    first = drawn(1)
    assert first == drawn(1) != drawn(2)
    assert [is_legal(frames[-1], VOCAB) for frames in first] == [number % 2 == 1 for number in range(200)]
    legal = [frame for frames in first for frame in frames if is_legal(frame, VOCAB)]
    assert {type(decode(frame, vocab_size=VOCAB)) for frame in legal} == set(KINDS)
    short = {kind for kind in KINDS if issubclass(kind, SessionMessage) and kind.compact_code is not None}
    assert {type(decode(frame)) for frame in legal if frame[0] < FIRST_OF_ARRAY} == short != set()
    assert len(set(legal)) > 0.3 * len(legal), "few fields make few different messages"
