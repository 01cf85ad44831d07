"""`pipeline` on stages: the text is the target's for any drafter, and the turns are those of the paper's arithmetic."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from lab.baselines.flowspec import WAYS, strategy_of
from lab.configs import a_config
from lab.engines import Arbitrary
from lab.simulation import SimulatedSession, Simulation, StageTimes
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import Branch, Cancelled, Emit, Forward, Retrieved, Scored, Started
from paceline.strategies.pipeline import Pipeline
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DraftLimits, Options
from tests.strategies.cases import BRANCHES, EOS, MAX_TOKENS, PROMPT, SAMPLINGS, VOCAB, Manner, engines, job, point
from tests.strategies.conformance.laws import alone
from tests.strategies.pipeline.worlds import Knowing, Random, Silent, Wrong, simulated, strategy_with

PLAIN = STRATEGIES["autoregressive"]
OURS = STRATEGIES["pipeline"]
FULL = Options(rescoring=False)
NO_END = frozenset[int]()
ROWS = 16


def stages(count: int, *, hop: float = 0.0) -> StageTimes:
    return StageTimes(count, lambda _: 1.0, hop)


def turns(world: Simulation) -> tuple[float, SimulatedSession]:
    """Turns from the first token to the last."""
    began: list[float] = []

    def first(world: Simulation) -> None:
        if world.front.tokens and not began:
            began.append(world.now)

    answer = world.run(first)
    return world.now - began[0], answer


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "PipeDec"])
def test_text_is_the_target_s_for_any_number_of_stages_segment_size_and_drafter(count: int, way: str) -> None:
    """With jitter between stages, so that prunes come early and late."""
    chance = random.Random(f"{count} {way}")
    for sampling in SAMPLINGS.values():
        expected = simulated(PLAIN, sampling=sampling, stages=stages(1)).run().tokens
        for seed in range(2):
            options = Options(False, DraftLimits(rows=chance.choice((1, 2, 5, 16))))
            times = StageTimes(count, lambda n, c=chance: 1.0 + 0.1 * n * c.random(), chance.choice((0.0, 0.3, 2.0)))
            strategy = strategy_with(lambda s=seed, e=expected: Random(e, random.Random(s)), WAYS[way])
            world = simulated(strategy, options, stages=times, sampling=sampling, needs_dists=seed == 1)
            assert world.run().tokens == expected, (sampling, seed)
    assert simulated(strategy_of(way), FULL, stages=stages(count), sampling=sampling).run().tokens == expected


@pytest.mark.parametrize("seed", range(4))
def test_layers_of_any_drafts_leave_the_text(seed: int) -> None:
    expected = simulated(PLAIN, sampling=SAMPLINGS["sampled"]).run().tokens
    strategy = strategy_with(lambda: Random(expected, random.Random(seed)), WAYS["PipeDec"])
    assert simulated(strategy, FULL, sampling=SAMPLINGS["sampled"]).run().tokens == expected


def test_models_that_say_anything_at_all_change_nothing() -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    expected = simulated(PLAIN, engine=Arbitrary(FakeEngine(seed=3)), sampling=sampling).run().tokens
    for drafter in (None, lambda: Random(expected, random.Random(5))):
        world = simulated(strategy_with(drafter), FULL, engine=Arbitrary(FakeEngine(seed=3)), sampling=sampling)
        assert world.run().tokens == expected


@pytest.mark.parametrize(
    ("hop", "documents", "rescoring"), [(0.0, "one", True), (0.4, "several", True), (0.0, "several", False)]
)
def test_documents_are_mixed_on_stages_as_on_one_engine(hop: float, documents: str, rescoring: bool) -> None:
    branches = BRANCHES | {"cloud": BRANCHES["cloud"][: 1 if documents == "one" else 2]}
    for sampling in SAMPLINGS.values():
        manner = Manner(rescoring=rescoring)
        request = job(OURS, "cloud", sampling, branches=branches, manner=manner)
        world = Simulation(request, engines(), stages={"cloud": stages(3, hop=hop)})
        assert world.run().tokens == alone("cloud", sampling, manner, MAX_TOKENS, branches=branches)


# ---- turns ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 4])
def test_where_no_draft_is_right_a_token_takes_as_many_turns_as_without_drafts(count: int) -> None:
    """N turns, and 2N where the whole tree is waited for: a tree of N + 1 full segments leaves the first stage after
    N + 1 turns."""
    tokens = 8
    tree = ROWS * (count + 1)
    expected = {"plain": count, "naive": 2 * count, "pruned": count, "without score order": count, "full": count}
    for way, each in expected.items():
        strategy = PLAIN if way == "plain" else strategy_with(Wrong, partial(WAYS[way], nodes=tree))
        # More tokens are allowed than are counted, so that no tree is cut short by the end of the answer.
        took = time_of_tokens(simulated(strategy, FULL, stages=stages(count), tokens=200, eos_ids=NO_END), tokens)
        assert took == each * tokens, way


def time_of_tokens(world: Simulation, tokens: int) -> float:
    """Turns from the first token to the one so many later; the answer is then cancelled."""
    times: list[float] = []

    def look(world: Simulation) -> None:
        times.extend([world.now] * (len(world.front.tokens) - len(times)))
        if len(times) > tokens and world.front.finished is None:
            world.front.deliver_later(Cancelled())

    world.run(look)
    return times[tokens] - times[0]


def test_nothing_is_drafted_where_nothing_may_be() -> None:
    options = Options(False, DraftLimits(1, 1, 0))
    world = simulated(strategy_with(Wrong), options, tokens=10, eos_ids=NO_END)
    took, answer = turns(world)
    assert took == 9 * 4 and answer.finished is not None and answer.finished.stats["drafted"] == 9


@pytest.mark.parametrize("count", [2, 4])
def test_a_chain_that_is_always_right_gives_a_segment_s_rows_in_every_turn(count: int) -> None:
    tokens = 1 + 10 * ROWS
    reference = simulated(PLAIN, tokens=tokens, eos_ids=NO_END)
    text = reference.run().tokens

    def timed(way: str) -> tuple[float, SimulatedSession]:
        strategy = strategy_with(lambda: Knowing(text), WAYS[way])
        return turns(simulated(strategy, FULL, tokens=tokens, eos_ids=NO_END, stages=stages(count)))

    took, answer = timed("full")
    assert answer.tokens == text
    assert took == count - 1 + 10, "the pipe fills once; from then on each turn has a segment's tokens"
    once, naive = timed("pruned")[0], timed("naive")[0]
    assert took < once <= naive


def test_a_drafter_that_is_silent_costs_nothing() -> None:
    plain, _ = turns(simulated(PLAIN, tokens=20, eos_ids=NO_END))
    took, answer = turns(simulated(strategy_with(Silent), FULL, tokens=20, eos_ids=NO_END))
    assert took == plain and answer.finished is not None and answer.finished.stats["rows"] == 20


def test_news_of_a_prune_that_come_late_waste_rows_and_nothing_else() -> None:
    """With a hop as long as a stage's forward, stages run what has been dropped already."""
    expected = simulated(PLAIN, tokens=40, eos_ids=NO_END).run().tokens
    answers = [
        simulated(
            strategy_with(lambda: Random(expected)), FULL, tokens=40, eos_ids=NO_END, stages=stages(4, hop=hop)
        ).run()
        for hop in (0.0, 1.0)
    ]
    assert all(answer.tokens == expected for answer in answers)
    assert all(answer.finished is not None and answer.finished.stats["dropped"] > 0 for answer in answers)


def test_a_prompt_flows_through_the_stages_in_chunks() -> None:
    """Of 512 rows in a pipeline of four stages each step has 128, so that all stages are at work on one prompt."""
    long = BRANCHES | {"cloud": (replace(BRANCHES["cloud"][0], prompt=tuple([65] * 1000), score=None),)}
    request = job(OURS, "cloud", SAMPLINGS["greedy"], branches=long, max_tokens=1)
    seconds = {}
    for rows in (4, 1):
        times = StageTimes(rows, lambda n, rows=rows: n / rows)
        world = Simulation(request, engines(), stages={"cloud": times})
        world.run()
        seconds[rows] = world.now
    assert seconds[1] == 1000 and seconds[4] < 0.4 * seconds[1]


# ---- by hand --------------------------------------------------------------------------------------------------------
def test_as_many_segments_are_under_way_as_the_engine_asks_for() -> None:

    for depth in (1, 3, 6):
        config = a_config("cloud", True, SamplingParams(temperature=0.0), 200, EOS, VOCAB, FULL, depth=depth)
        machine = Pipeline(config, drafter=Wrong())
        machine.on(Started(0.0))
        machine.on(Retrieved((Branch(PROMPT, None),)))
        effects = machine.on(Scored(1, (point(65),)))
        sent = [effect for effect in effects if isinstance(effect, Forward)]
        assert len(sent) == max(1, depth - 1) and [e.token for e in effects if isinstance(e, Emit)] == [65]
        ids = [name for forward in sent for name in forward.segment.node_ids]
        assert ids == list(range(len(ids))) and len(ids) <= 96
