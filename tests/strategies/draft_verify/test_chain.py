"""The drafter's chain and the verifier's copy of it agree, whatever becomes of drafts and messages."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.decoding.prefix_tree import PrefixTree
from paceline.strategies.draft_verify.drafting import Chain
from paceline.strategies.draft_verify.target_writer import PeerChain
from paceline.strategies.draft_verify.verifiers import Agreement, Draft
from paceline.strategies.joint import MAX_EARLY, MAX_EARLY_BYTES, EarlyTargets
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode, encode
from paceline.wire.messages import TOKEN_BYTES, DistPayload, Targets
from paceline.wire.payloads import encode_places
from paceline.wire.verify_messages import MAX_CHAIN, DraftChain, Rejected

AGREEMENT = Agreement(SamplingParams())


def take(copy: PeerChain, message: DraftChain) -> None:
    copy.receive(message, AGREEMENT.received(message))


def below(copy: PeerChain, targets: list[int]) -> list[int] | None:
    drafts = copy.below(targets)
    return None if drafts is None else [draft.token for draft in drafts]


def chain(base: int, offset: int, *tokens: int) -> DraftChain:
    return DraftChain(0, 0, base, offset, encode_places([(token, None) for token in tokens]))


@given(st.integers(0, 2**32))
def test_the_verifiers_copy_holds_a_beginning_of_what_follows_its_targets(seed: int) -> None:
    """Random drafts, verdicts, losses, repetitions and reorderings: what the verifier reads below its targets is what
    the drafter had below the same prefix, or nothing."""
    draw = random.Random(seed)
    tree, drafted = PrefixTree(0), Chain(0)
    copy, targets, known = PeerChain(), [], 0
    sent: list[DraftChain] = []
    drafts_below: dict[tuple[int, ...], set[int]] = {}  # prefix -> tokens ever drafted after it
    for _ in range(40):
        action = draw.choice(("draft", "send", "deliver", "verify", "hear", "resend"))
        if action == "draft":
            last = drafted.nodes[-1] if drafted.nodes else tree.head
            token = draw.randrange(3)
            prefix = (*targets[:known], *(node.token for node in drafted.nodes))
            drafts_below.setdefault(prefix, set()).add(token)
            drafted.add(last.child(token), Draft(token), 0.0)
        elif action == "send" and drafted.unsent:
            sent.append(chain(drafted.base, drafted.sent, *(draft.token for draft in drafted.unsent)))
            drafted.sent += len(drafted.unsent)
        elif action == "resend":
            drafted.resend(known)
        elif action == "deliver" and sent:
            take(copy, draw.choice(sent))
        elif action == "verify":
            known_below = below(copy, targets) or []
            targets.append(known_below[0] if known_below and draw.random() < 0.7 else draw.randrange(3))
        elif action == "hear" and known < len(targets):
            drafted.advance(tree.advance(targets[known]))
            known += 1
        path = list(targets)
        for token in below(copy, targets) or []:
            assert token in drafts_below.get(tuple(path), set())
            path.append(token)


def test_targets_wait_for_those_before_them_and_of_two_the_longer_counts() -> None:
    early = EarlyTargets()
    early.add(Targets(0, 0, 2, [7], b""), 0)
    assert early.pop(0) is None
    early.add(Targets(0, 0, 0, [5, 6], b""), 0)
    early.add(Targets(0, 0, 0, [5], b""), 0)
    first = early.pop(0)
    assert first is not None and first.tokens == [5, 6]
    second = early.pop(2)
    assert second is not None and second.start == 2
    for start in range(MAX_EARLY + 10):
        early.add(Targets(0, 0, 100 + start, [], b""), 0)
    assert early.pop(0) is None and len([1 for _ in iter(lambda: early.pop(10_000), None)]) == MAX_EARLY


def test_targets_that_wait_have_a_limit_of_bytes_which_counts_their_distributions() -> None:
    half, most = MAX_EARLY_BYTES // 2, MAX_EARLY_BYTES // TOKEN_BYTES
    early = EarlyTargets()
    early.add(Targets(0, 0, 10, [1] * (most // 2), b""), 0)
    early.add(Targets(0, 0, 20, [1], b"", b"", [DistPayload(bytes(half), b"")]), 0)
    assert early.pop(20) is not None and early.pop(20) is None, "together they would be too many"
    early.add(Targets(0, 0, 20, [1], b"", b"", [DistPayload(bytes(half), bytes(half - TOKEN_BYTES))]), 0)
    early.add(Targets(0, 0, 20, [1] * most, b""), 0)  # replaces the other, so that its room counts
    early.add(Targets(0, 0, 0, [1] * 2 * most, b""), 0)  # it need not wait
    early.add(Rejected(0, 0, 30, [], b"", b"", [], DistPayload(bytes(half), bytes(half + 1))), 0)
    taken = [early.pop(0), early.pop(20), early.pop(30)]
    assert [None if each is None else len(each.tokens) for each in taken] == [2 * most, most, None]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (chain(0, 0, 300), "outside the vocabulary"),
        (chain(0, MAX_CHAIN - 1, 1, 2), f"more than {MAX_CHAIN} tokens"),
        (Targets(0, 0, 0, [300], b""), "outside the vocabulary"),
        (Targets(0, 0, 2**31 - 1, [1, 1], b""), "positions beyond"),
        (Targets(0, 0, 0, [1, 1], b"", b"", [DistPayload(b"", b"")]), "1 distributions for 2 tokens"),
    ],
)
def test_faults_of_fields_are_told(message: DraftChain | Targets, fault: str) -> None:
    assert fault in (message.fault(257) or "")


def test_a_drafted_token_of_a_real_vocabulary_takes_less_than_four_bytes() -> None:
    """A chain of 15 with ids above 2**16, in an answer's middle, in the session of a link that is long up."""
    message = msgspec.structs.replace(chain(300, 0, *range(151_000, 151_015)), session=1001)
    frame = encode(message)
    assert len(frame) / 15 < 4.0
    assert decode(frame) == message and DraftChain in STRATEGIES["draft_verify"].messages
