"""Tables learn from one answer, and the next one drafts from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from lab.simulation import Simulation
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable, bigram_key
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import Branch, Machine, MachineConfig, Side, Started
from paceline.strategies.decoding.prefix_tree import NgramDrafts, PrefixTree
from paceline.strategies.lookup_tree import LookupTree
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Drafts
from paceline.wire.payloads import unpack_nodes
from tests.core.tables import check
from tests.strategies import oracle
from tests.strategies.cases import (
    BRANCHES,
    EOS,
    MAX_TOKENS,
    PROMPT,
    SAMPLINGS,
    VOCAB,
    Hand,
    Manner,
    Only,
    cloud,
    decided,
    engines,
    found,
    job,
    point,
    two,
)

HEATS = (0.1, 0.0, 1.0)
DIST = two(65, 66, 0.6)


def test_a_first_token_waits_for_no_reading_and_nothing_decided_meanwhile_is_lost() -> None:
    branches = [Branch((1, 2, 3, 4, 5, 6), 0.0), Branch((7, 2, 3, 8, 9), 0.0)]
    both_drafts = [NgramDrafts(NgramDrafter(LookupTable(VOCAB), SamplingParams(temperature=0.0))) for _ in range(2)]
    at_once, late = both_drafts
    for drafts in both_drafts:
        drafts.start(branches, (1,))
    tree = PrefixTree(1)
    for _ in branches:
        at_once.read()
    for token in (2, 3):
        for drafts in both_drafts:
            drafts.observe_target(tree.head, token)
        tree.advance(token)
    late.read()
    assert not late.children(tree.head, tree.head)  # the second prompt has not been read
    late.read()

    assert late.children(tree.head, tree.head) == at_once.children(tree.head, tree.head)
    assert [token for token, _ in late.children(tree.head, tree.head)] == [4]  # what followed 1, 2, 3


EVERY_MACHINE = pytest.mark.parametrize("machine", [Aggregate, LookupTree])


@EVERY_MACHINE
@pytest.mark.parametrize(
    "changes",
    [
        *({"sampling": sampling} for sampling in SAMPLINGS.values()),
        {"sampling": SamplingParams(temperature=0.1, logit_bias=((65, -50.0), (67, 50.0)))},
        {"mask": Only(65)},
    ],
)
def test_tables_learn_what_the_model_predicted_before_any_processing(
    machine: Callable[[MachineConfig], Machine], changes: dict[str, object]
) -> None:
    table = LookupTable(VOCAB)
    hand = Hand(machine, "device", front=True, joined=False, table=table, **{"max_tokens": 12} | changes)
    hand.say = lambda _: DIST
    hand.forward_s = 0.01
    hand.begin()
    assert len(table) > 1  # the last token of the prompt, and some of the answer
    for token in {*hand.tokens[:-1], PROMPT[-1]}:
        ids, probs = table.successors(token)
        assert not ids or (ids, probs) == (
            [i for i, _ in DIST.top(NUM_SUCCESSORS)],
            pytest.approx([p for _, p in DIST.top(NUM_SUCCESSORS)]),
        )
    check(table)


@EVERY_MACHINE
def test_a_context_of_two_tokens_is_learnt_with_the_distribution_after_it(
    machine: Callable[[MachineConfig], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token stands after several others, and of a large vocabulary not every row is a lesson."""
    monkeypatch.setattr("paceline.strategies.decoding.prefix_tree.STEP_PROBS", VOCAB / 3)

    def after(before: int, token: int) -> int:
        return random.Random(f"15 {before} {token}").randrange(10, 20)

    table = LookupTable(VOCAB)
    hand = Hand(machine, "device", front=True, joined=False, table=table, max_tokens=800)
    hand.say = lambda path: point(after(*(*PROMPT, *path)[-2:]))
    hand.forward_s = 0.01
    hand.begin()
    assert table.bigrams is not None
    known = set()
    for before, token in pairwise((*PROMPT, *hand.tokens)):
        ids, _ = table.bigrams.successors(bigram_key(before, token))
        assert not ids or ids[0] == after(before, token), (before, token)
        known |= {(before, token)} if ids else set()
    assert len(known) > 2 and len({token for _, token in known}) < len(known)


def test_targets_whose_distribution_is_not_known_here_teach_nothing() -> None:
    table = LookupTable(VOCAB)
    hand = cloud(table=table)
    hand.on(Started(0.0), decided(0, 65, 66), found())
    hand.answer()
    assert len(table) == 0
    hand.on(decided(2, 70, 71))
    assert table.successors(66)[0][0] == 65 and len(table) == 1
    assert table.bigrams is not None and table.bigrams.successors(bigram_key(65, 66))[0][0] == 65


@pytest.mark.parametrize(
    ("front", "manner"), [("cloud", Manner("coin")), ("device", Manner(private=False, rescoring=True))]
)
def test_answers_of_different_temperatures_share_a_table(front: Side, manner: Manner) -> None:
    table = LookupTable(VOCAB)
    for heat in HEATS:
        sampling = SamplingParams(temperature=heat, seed=9)
        expected = oracle.REFERENCES[manner.rule](
            engines(), BRANCHES, sampling, MAX_TOKENS, EOS, rescoring=manner.rescoring
        )
        world = Simulation(job(STRATEGIES["aggregate"], front, sampling, manner=manner, table=table), engines())
        assert world.run().tokens == expected
        check(table)
    assert len(table) > 10


def test_what_other_answers_have_taught_reaches_no_peer_before_it_is_a_target() -> None:
    """On either side: earlier answers may be private."""
    table = LookupTable(VOCAB)
    for token in range(40, 50):
        table.record(token, [token + 1], [0.9])
    hand = cloud(table=table, private=False, max_tokens=100)
    hand.say = lambda _: two(90, 91)
    hand.begin()
    hand.on(decided(0, 40))
    hand.answer()
    assert (40, 41, 42) in hand.rows, "nothing was drafted"
    tokens = {token for message in hand.sent if isinstance(message, Drafts) for token in edges(message)}
    assert tokens <= {90, 91, *(token for token, _ in two(90, 91).top(4))}


def edges(message: Drafts) -> Sequence[int]:
    nodes = unpack_nodes(message.nodes, VOCAB)
    return [token for parent, token in zip(nodes.parents, nodes.tokens, strict=True) if parent >= 0]
