"""Sampling by the declared distribution: the first two tokens over many seeds, and every token of an answer on a bad
link.

The reference of the first is computed here, not by the machine's own mixing: one softmax over all documents wherever
they lie (DRAGON eq. 2 and 4).
"""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from lab.simulation import Simulation
from paceline.core.aggregation.aggregators import AggregatorName
from paceline.core.aggregation.weights import mix_weighted, side_weights
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import SIDES, Branch, RoutingContext, Side, Wish
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions
from tests.core.chi_square import assert_drawn_from
from tests.depth import DEPTH
from tests.strategies import oracle
from tests.strategies.cases import BRANCHES, SAMPLINGS, VOCAB, Manner, engines, job
from tests.strategies.conformance.worlds import harsh

pytestmark = pytest.mark.slow

NUM_SEEDS = 250 * DEPTH
SHORT: dict[Side, tuple[Branch, ...]] = {
    "cloud": (Branch(tuple(b"a "), 0.8), Branch(tuple(b"in "), 0.1)),
    "device": (Branch(tuple(b"th"), 1.8),),
}
Probs = NDArray[np.float64]


def expected(
    who: tuple[Side, ...], by: dict[Side, Engine], prefix: tuple[int, ...], *, rescoring: bool = False
) -> Probs:
    """(VOCAB,) the mixture of all documents of these sides. rescoring: what each has predicted of the prefix counts,
    and how sure a side is of the next token."""
    scores: list[float] = []
    rows: list[Probs] = []
    for side in who:
        first = len(rows)
        for branch in SHORT[side]:
            assert branch.score is not None
            segment = Segment(SeqId(1), 0, (*branch.prompt, *prefix), None, "all")
            known = by[side].forward(Batch((segment,))).dists[0][-1 - len(prefix) :]
            by[side].release(SeqId(1))
            said = [math.log(max(row.prob(token), math.exp(-5.0))) for row, token in zip(known, prefix, strict=False)]
            evidence = sum(0.5**age * each for age, each in enumerate(reversed(said)))
            scores.append(branch.score + (evidence if rescoring else 0.0))
            rows.append(known[-1].probs)
        if rescoring:
            own = np.exp(scores[first:])
            nats = [row @ np.maximum(np.log(np.maximum(row, 1e-30)), -5.0) for row in rows[first:]]
            sure = float(own @ nats) / float(own.sum())
            scores[first:] = [score + sure for score in scores[first:]]
    weights = np.exp(scores)
    mixture: Probs = (weights / weights.sum()) @ np.array(rows)
    return mixture


@pytest.mark.parametrize(
    ("name", "rule", "front", "who"),
    [
        ("autoregressive", "mixture", "cloud", ("cloud",)),
        ("aggregate", "mixture", "device", ("cloud", "device")),
        ("aggregate", "coin", "cloud", ("cloud", "device")),
        ("aggregate", "paper", "device", ("cloud", "device")),
    ],
)
def test_the_first_two_tokens_follow_the_law(
    name: str, rule: AggregatorName, front: Side, who: tuple[Side, ...]
) -> None:
    """The distribution of `paper` but for the 0.1 % of mass that it does not ship: less than so few seeds can show.
    With another front the text is the same (`conformance`)."""
    by: dict[Side, Engine] = {"cloud": FakeEngine(seed=1, spread=0.3), "device": FakeEngine(seed=2, spread=0.3)}
    pairs: Counter[tuple[int, int]] = Counter()
    manner = Manner(rule, private=front == "device")
    for seed in range(NUM_SEEDS):
        sampling = SamplingParams(seed=seed)
        this = job(STRATEGIES[name], front, sampling, branches=SHORT, max_tokens=2, eos_ids=frozenset(), manner=manner)
        first, second = Simulation(this, by).run().tokens
        pairs[first, second] += 1
    law_of_first = expected(who, by, ())
    law_of_pairs = np.array([law_of_first[token] * expected(who, by, (token,)) for token in range(VOCAB)])
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for pair, count in pairs.items():
        counts[pair] = count
    assert_drawn_from(counts.sum(axis=1), law_of_first)
    assert_drawn_from(counts.sum(axis=0), law_of_pairs.sum(axis=0))
    assert_drawn_from(counts.ravel(), law_of_pairs.ravel())


@pytest.mark.parametrize(("seeded", "private", "front"), [(True, False, "device"), (False, True, "cloud")])
def test_a_named_seed_does_not_change_the_distribution(seeded: bool, private: bool, front: Side) -> None:
    """By default a seed gives `mixture` and none `coin`. Pairs of tokens are counted by how much likelier they are
    because weights follow the text, which is where the two would differ if only one of them did."""
    by: dict[Side, Engine] = {"cloud": FakeEngine(seed=1, spread=0.9), "device": FakeEngine(seed=2, spread=0.9)}
    options = STRATEGIES["aggregate"].options_for(RoutingContext(front, Wish("aggregate", seeded=seeded)))
    assert isinstance(options, AggregateOptions) and options.rescoring
    assert options.aggregator == ("mixture" if seeded else "coin")
    manner = Manner("mixture" if seeded else "coin", private=private, rescoring=True)
    drawn = np.zeros((VOCAB, VOCAB))
    for seed in range(NUM_SEEDS):
        sampling = SamplingParams(seed=seed if seeded else -1 - seed)
        this = job(
            STRATEGIES["aggregate"], front, sampling, branches=SHORT, max_tokens=2, eos_ids=frozenset(), manner=manner
        )
        first, second = Simulation(this, by).run().tokens
        drawn[first, second] += 1
    law, without = (
        expected(SIDES, by, (), rescoring=rescoring)[:, np.newaxis]
        * np.array([expected(SIDES, by, (token,), rescoring=rescoring) for token in range(VOCAB)])
        for rescoring in (True, False)
    )
    gain = np.digitize(law / np.maximum(without, 1e-30), (0.67, 0.82, 0.9, 1.0, 1.1, 1.22, 1.5))
    counts, probs, wrong = (np.bincount(gain.ravel(), each.ravel()) for each in (drawn, law, without))
    assert_drawn_from(counts, probs)
    with pytest.raises(AssertionError):
        assert_drawn_from(counts, wrong)


@pytest.mark.parametrize(
    ("front", "how", "private"),
    [
        ("cloud", "sampled", True),
        ("cloud", "filtered", False),
        ("device", "sampled", False),
        ("device", "filtered", True),
    ],
)
def test_every_token_is_lawful_though_the_link_flaps(front: Side, how: str, private: bool) -> None:
    """Each is what the mixture, or the front alone, would have chosen at its prefix: nothing else may be mixed in."""
    by, sampling = engines(), SAMPLINGS[how]
    only: Counter[str] = Counter()  # tokens that only one of the two would have chosen
    for seed in range(8):
        chance = random.Random(f"flap {seed}")

        def flap(world: Simulation, chance: random.Random = chance) -> None:
            draw = chance.random()
            if draw < 0.02:
                world.cut()
            elif draw < 0.08:
                world.mend()

        tokens = (
            harsh(seed)
            .world(job(STRATEGIES["aggregate"], front, sampling, manner=Manner(private=private)), seed)
            .run(flap)
            .tokens
        )
        for position, token in enumerate(tokens):
            by_side = {side: oracle.side_dist(by[side], BRANCHES[side], tokens[:position], sampling) for side in SIDES}
            dists, weights = (
                {side: dist for side, (dist, _) in by_side.items()},
                side_weights({side: h for side, (_, h) in by_side.items()}),
            )
            mixture = mix_weighted([dists[side] for side in SIDES], [weights[side] for side in SIDES])
            together = sample(filter_top(mixture, sampling), sampling, position)
            alone = sample(filter_top(dists[front], sampling), sampling, position)
            assert token in (together, alone), f"seed {seed}, position {position}"
            if together != alone:
                only["together" if token == together else "alone"] += 1
    assert only["together"] >= 5 and only["alone"] >= 5, only
