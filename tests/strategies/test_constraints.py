"""Answers held to a schema or to tools: valid and unchanged whatever the strategy, the dists and the network.

Strategies come from the registry: one that is added is held to this, unasked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from lab.engines import Arbitrary
from lab.simulation import Network, Simulation
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import Constraint, Mask, SamplingParams, apply_mask
from paceline.engine.base import Engine
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.engine.grammar.compiler import GrammarCompiler
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import (
    SIDES,
    Branch,
    ClosePeer,
    Event,
    Forward,
    LinkLost,
    OutputRules,
    Scored,
    Side,
    Strategy,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixTree
from paceline.strategies.registry import STRATEGIES
from paceline.strategies.solo import Solo
from tests.depth import DEPTH
from tests.strategies.cases import EOS, PROMPT, SAMPLINGS, VOCAB, Hand, decided, heard, job, manners, point
from tests.strategies.conformance.laws import check_text

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bari", "Oslo"]},
        "rooms": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 3},
        "open": {"type": "boolean"},
    },
    "required": ["city", "rooms"],
    "additionalProperties": False,
}
TOOLS = {"tools": [{"name": "look", "parameters": SCHEMA}, {"name": "now"}], "required": True, "parallel": False}
LONG = 200  # tokens: longer than any answer here
GRAMMARS = GrammarCompiler(ByteTokenizer())
CONSTRAINTS = {"schema": Constraint("json_schema", json.dumps(SCHEMA)), "tools": Constraint("tools", json.dumps(TOOLS))}
MASKS = {name: GRAMMARS.mask(constraint) for name, constraint in CONSTRAINTS.items()}
WAYS = [(strategy, name) for strategy in STRATEGIES.values() for name in manners(strategy)]


def speaking() -> dict[Side, Engine]:
    """Two models that know nothing of JSON: most of what they would say is forbidden, and a quote is impossible."""
    return {"cloud": FakeEngine(seed=1, spread=0.3), "device": FakeEngine(seed=1, spread=0.5)}


def raving() -> dict[Side, Engine]:
    """Two models for which anything may follow, each with dists of its own."""
    return {"cloud": Arbitrary(FakeEngine(seed=1, spread=0.3)), "device": Arbitrary(FakeEngine(seed=2, spread=0.5))}


MODELS = {"speaking": speaking, "raving": raving}


def check(name: str, tokens: list[int]) -> None:
    """The text is whole, and what the constraint says."""
    text = bytes(tokens).decode()
    value = json.loads(text if name == "schema" else text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    if name == "tools":
        assert set(value) == {"name", "arguments"}
        known = {"look": SCHEMA, "now": {"type": "object", "maxProperties": 0}}
        Draft202012Validator(known[value["name"]]).validate(value["arguments"])
    else:
        Draft202012Validator(SCHEMA).validate(value)


CASES: list[tuple[str, str, Side, str]] = [
    ("raving", "schema", "cloud", "sampled"),
    ("speaking", "tools", "device", "sampled"),
    ("raving", "tools", "device", "filtered"),
    ("speaking", "schema", "cloud", "greedy"),
]


# One of them with every second way by turns, one of `ENDS` with the others; all at a greater depth.
TRIED = [
    pytest.param(*way, *case, id=f"{'-'.join(case)}-{way[0].name}, {way[1]}")
    for number, way in enumerate(WAYS)
    for at, case in enumerate(CASES)
    if DEPTH > 1 or (number % 2 == 0 and at == number // 2 % len(CASES))
]


@pytest.mark.parametrize(("strategy", "way", "models", "name", "front", "sampling"), TRIED)
def test_text_equals_the_reference_in_random_interleavings_and_validates(
    strategy: Strategy, way: str, models: str, name: str, front: Side, sampling: str
) -> None:
    """The reference masks too: token by token, synchronously. A link in order, and a lossy one with changing speeds."""
    rules: dict[str, Any] = {"by": MODELS[models], "mask": MASKS[name], "max_tokens": LONG}
    for seed in seeds_of(way):
        asked = strategy, manners(strategy)[way], front, SAMPLINGS[sampling]
        check(name, check_text(*asked, [seed], reorders=seed == 1, **rules))


def seeds_of(way: str) -> set[int]:
    return {0, 1} if DEPTH > 1 else {len(way) % 2}


BIASED = SamplingParams(temperature=0.7, seed=3, logit_bias={ord("!"): 90.0, max(EOS): 80.0})
SHORT = 40  # tokens
ENDS = {  # of a model that says "!" for ever, or ends as soon as it may
    "not early": (GRAMMARS.mask(Constraint("text", min_tokens=20)), "!" * 20, {max(EOS): 99.0}),
    "never": (GRAMMARS.mask(Constraint("text", ignore_eos=True)), "!" * SHORT, {max(EOS): 99.0}),
    "closed": (GRAMMARS.mask(Constraint("json_schema", '{"type": "string"}')), f'"{"!" * 32}"', {}),
}


# The ends and the fronts by turns, with every way that `TRIED` leaves out; all of these at a greater depth.
ENDED = [
    pytest.param(*way, front, name, id=f"{name}-{front}-{way[0].name}, {way[1]}")
    for number, way in enumerate(WAYS)
    for at, (name, front) in enumerate(product(ENDS, SIDES))
    if DEPTH > 1 or (number % 2 == 1 and at == number // 2 % 6)
]


@pytest.mark.parametrize(("strategy", "way", "front", "name"), ENDED)
def test_where_an_answer_ends_is_the_same_whichever_strategy_writes(
    strategy: Strategy, way: str, front: Side, name: str
) -> None:
    mask, expected, biases = ENDS[name]
    sampling, manner = replace(BIASED, logit_bias={**BIASED.logit_bias, **biases}), manners(strategy)[way]
    rules: dict[str, Any] = {"by": raving, "mask": mask, "max_tokens": SHORT}
    for seed in seeds_of(way):
        text = check_text(strategy, manner, front, sampling, [seed], reorders=seed == 1, **rules)
        assert bytes(text).decode() == expected


# Every second way, and the fronts by turns; all at a greater depth.
FRONTS = [
    pytest.param(*way, front, id=f"{front}-{way[0].name}, {way[1]}")
    for number, way in enumerate(WAYS)
    for front in SIDES
    if DEPTH > 1 or (number % 2 == 0 and front == SIDES[number // 2 % 2])
]


@pytest.mark.parametrize(("strategy", "way", "front"), FRONTS)
def test_a_peer_lost_on_the_way_leaves_a_text_that_is_whole(strategy: Strategy, way: str, front: Side) -> None:
    """And one that comes back: each side masks from the targets that it was opened with."""
    for step in (3, 29, 61):

        def flap(world: Simulation, step: int = step) -> None:
            if world.events == step:
                world.cut()
            elif world.events == 2 * step and step > 3:
                world.mend()

        manner = manners(strategy)[way]
        this = job(strategy, front, SAMPLINGS["sampled"], manner=manner, max_tokens=LONG, mask=MASKS["schema"])
        answer = Simulation(this, raving(), seed=step, network=Network((0.01, 0.05))).run(flap)
        check("schema", answer.tokens)
        assert answer.finished is not None and answer.finished.reason == "stop"


INNER = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"enum": ["a", "b\n", 5, None]}, {"type": "string", "maxLength": 4}]),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, *[st.integers(0, 50)] * 2),
)
OBJECTS = st.dictionaries(st.text('abc"é', max_size=2), INNER, max_size=3).flatmap(
    lambda held: st.sets(st.sampled_from(sorted(held)) if held else st.nothing()).map(
        lambda some: {"type": "object", "properties": held, "required": sorted(some), "additionalProperties": False}
    )
)


@given(
    OBJECTS, st.sampled_from(WAYS), st.sampled_from(SIDES), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.integers(0, 2**31)
)
@settings(deadline=None, max_examples=20)
def test_whatever_the_schema_and_the_laws_the_text_validates(
    schema: Mapping[str, object], way: tuple[Strategy, str], front: Side, temperature: float, seed: int
) -> None:
    strategy, name = way
    mask = GRAMMARS.mask(Constraint("json_schema", json.dumps(schema)))
    sampling = SamplingParams(temperature=temperature, seed=seed, logit_bias={34: -100.0}, presence_penalty=1.0)
    this = job(strategy, front, sampling, manner=manners(strategy)[name], max_tokens=LONG, mask=mask)
    answer = Simulation(this, raving(), seed=seed, network=Network((0.0, 0.1))).run()
    assert answer.finished is not None and answer.finished.reason == "stop"
    Draft202012Validator(schema).validate(json.loads(bytes(answer.tokens)))


# ---- one machine, played by hand -----------------------------------------------------------------------------------
def yes_or_no() -> Mask:
    return GRAMMARS.mask(Constraint("json_schema", '{"enum": ["yes", "no"]}'))


HOSTILE: dict[str, tuple[Side, tuple[Event, ...]]] = {
    "targets": ("cloud", (*heard(0), decided(0, ord("x")))),
    "targets after good ones": ("cloud", (*heard(0), decided(0, *b'"nx'), decided(3, *b'o"'))),
    "an early end": ("cloud", (*heard(0), decided(0, ord('"'), min(EOS)))),
    "drafts": ("device", heard(0, ord("x"), log_weight=50.0)),
}


@pytest.mark.parametrize(("side", "events"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_peer_that_breaks_the_constraint_is_given_up_and_the_answer_goes_on(
    side: Side, events: tuple[Event, ...]
) -> None:
    hand = Hand(Aggregate, side, front=True, mask=yes_or_no())
    hand.say = lambda _: point(ord("n"))
    hand.begin()
    effects = hand.on(*events)
    (given_up,) = [effect for effect in effects if isinstance(effect, ClosePeer)]
    assert "form" in given_up.fault
    hand.on(LinkLost())
    hand.answer()
    assert bytes(hand.tokens) == b'"no"'
    assert hand.finish.reason == "stop"


def test_after_a_draft_that_breaks_the_constraint_nothing_comes_but_the_end() -> None:
    """A drafter may know nothing of the constraint; its rows are computed, and no target goes through them."""
    paths, decoder = PrefixTree(0), BranchDecoder(OutputRules(SamplingParams(), 9, EOS, VOCAB, yes_or_no()))
    asked = decoder.start((Branch(PROMPT, None),), (), paths.head, None)
    broken, whole = paths.head.child(ord("m")), paths.head.child(ord('"'))
    for nodes in ([paths.head], [whole, broken, broken.child(65)]):
        asked = asked or decoder.append_rows(nodes, paths.head, 0.0)
        (forward,) = asked
        assert isinstance(forward, Forward)
        decoder.take(Scored(forward.ticket, (point(65),) * len(nodes)))
        asked = []
    assert whole.own_dist is not None and {token for token, _ in whole.own_dist.whole.top(9)} == {*b"yn"}
    assert broken.own_dist is not None and broken.own_dist.whole.top(9) == [(256, 1.0)]
    assert broken.child(65).own_dist is not None


def test_what_an_engine_pads_its_vocabulary_with_is_never_chosen() -> None:
    def padded(_: tuple[int, ...]) -> Dist:
        probs = np.full(VOCAB + 7, 1e-6)
        probs[VOCAB:] = 1.0
        return Dist.dense(probs / probs.sum())

    hand = Hand(Solo, "device", front=True, joined=False, mask=yes_or_no())
    hand.say = padded
    hand.begin()
    assert bytes(hand.tokens) == b'"no"'
    assert hand.finish.reason == "stop"


def test_logprobs_are_the_models_own_whatever_the_mask_leaves() -> None:
    hand = Hand(Solo, "device", front=True, joined=False, mask=yes_or_no())
    hand.say = lambda _: point(ord("y"), 0.5)
    hand.begin()
    assert bytes(hand.tokens) == b'"yes"'
    assert [emit.dist and emit.dist.prob(emit.token) for emit in hand.emitted[:2]] == [pytest.approx(0.5 / 256), 0.5]


def test_the_mask_keeps_proportions_and_is_even_where_nothing_allowed_is_possible() -> None:
    dist = Dist.dense(np.array([0.5, 0.2, 0.1, 0.2, 0.0, 0.0]))
    assert apply_mask(dist, np.array([0, 1, 1, 0, 1, 0], dtype=bool)).probs == pytest.approx([0, 2 / 3, 1 / 3, 0, 0, 0])
    assert apply_mask(dist, np.array([0, 0, 0, 0, 1, 1, 1], dtype=bool)).probs == pytest.approx([0, 0, 0, 0, 0.5, 0.5])
    faint = Dist.dense(np.array([1.0, 3e-310, 1e-310]))
    assert apply_mask(faint, np.array([0, 1, 1], dtype=bool)).probs == pytest.approx([0, 0.75, 0.25])
    with pytest.raises(ValueError, match="allowed"):
        apply_mask(dist, np.zeros(6, dtype=bool))
