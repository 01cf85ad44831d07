"""`lookup_tree`, played by hand: spans of several tokens, where they end, and when a step's lessons are learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lab.baselines.lookup import FixedBudget
from lab.configs import a_config, changed
from lab.simulation import Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable, bigram_key
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import (
    Branch,
    Cancelled,
    Finish,
    Forward,
    Machine,
    MachineConfig,
    Retrieved,
    Scored,
    Started,
    Strategy,
    TimerFired,
    WakeAt,
)
from paceline.strategies.lookup_tree import LookupTree
from tests.strategies import oracle
from tests.strategies.cases import BRANCHES, EOS, MAX_TOKENS, PROMPT, SAMPLINGS, VOCAB, Hand, engines, found, job, point

GREEDY = SamplingParams(temperature=0.0)
CYCLE = (10, 11, 12, 13)
(END,) = EOS


def always(count: int) -> type | object:
    """A factory of machines that take so many drafts."""

    def machine(task: MachineConfig) -> Machine:
        return LookupTree(task, budget=FixedBudget(count))

    return machine


def hand(count: int = 8, **changes: object) -> Hand:
    return Hand(always(count), "cloud", front=True, joined=False, **changes)  # type: ignore[arg-type]


def cycling(hand: Hand, *, ends_after: int | None = None) -> Hand:
    """Its model says the same four tokens over and over."""

    def say(path: tuple[int, ...]) -> object:
        return point(END if ends_after is not None and len(path) >= ends_after else CYCLE[len(path) % len(CYCLE)])

    hand.say = say  # type: ignore[assignment]  # a Dist
    return hand


def forwards(hand: Hand) -> int:
    return sum(isinstance(effect, Forward) for effect in hand.effects)


def cycle(count: int) -> list[int]:
    return [CYCLE[i % len(CYCLE)] for i in range(count)]


def test_a_text_that_repeats_takes_few_forwards() -> None:
    played = cycling(hand(max_tokens=40))
    played.begin()
    assert played.tokens == cycle(40)
    assert forwards(played) < 20
    stats = played.finish.stats
    assert stats["forwards"] == forwards(played) and stats["accepted"] + stats["forwards"] == 40
    assert stats["drafted"] >= stats["accepted"] and played.finish.reason == "length"


@pytest.mark.parametrize("limit", range(12, 25))
def test_no_token_and_no_row_beyond_the_limit(limit: int) -> None:
    for changes, room in (({"max_tokens": limit}, None), ({"max_tokens": 100}, limit - 1)):
        played = cycling(hand(**changes))
        played.on(*played_from(room))
        played.answer()
        assert played.tokens == cycle(limit) and played.finish.reason == "length"
        assert max(len(path) for path in played.rows) <= limit - 1


def played_from(room: int | None) -> Sequence[object]:
    return [Started(0.0), found(room=room)]


def test_a_stop_string_in_the_middle_of_a_span_ends_the_answer_at_once() -> None:
    played = cycling(hand(max_tokens=40))
    played.on(*played_from(None))
    while len(played.tokens) < 20:
        played.answer_one()
    effects = played.on(Cancelled("stop"))
    assert [type(effect) for effect in effects] == [Finish]
    assert played.on(Cancelled()) == [] and played.answer() == []


def test_a_step_is_learnt_from_while_the_next_one_runs() -> None:
    table = LookupTable(VOCAB)
    played = cycling(hand(max_tokens=40, table=table))
    played.on(*played_from(None))
    effects = played.answer_one()
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Forward) < kinds.index(WakeAt) and len(table) == 0
    played.wake()
    assert len(table) == len(set(PROMPT))


def test_the_end_of_a_prompt_is_learnt_from_the_forward_that_read_it() -> None:
    prompt = tuple(range(20, 30))
    table = LookupTable(VOCAB)
    machine = LookupTree(a_config("cloud", True, GREEDY, 40, EOS, VOCAB, table=table))
    machine.on(Started(0.0))
    (read,) = [e for e in machine.on(Retrieved((Branch(prompt, None),), None)) if isinstance(e, Forward)]
    dists = tuple(point(prompt[row] + 10) for row in read.segment.logits_rows())
    assert len(dists) == len(prompt)
    machine.on(Scored(read.ticket, dists, 0.1))
    machine.on(TimerFired(0.2))
    assert all(table.successors(token)[0][0] == token + 10 for token in prompt)
    assert table.bigrams is not None and table.bigrams.successors(bigram_key(20, 21))[0][0] == 31


def test_an_answer_begins_with_what_an_earlier_one_taught() -> None:
    table, experience = LookupTable(VOCAB), OnlineStats()
    steps = []
    for _ in range(2):
        played = cycling(hand(max_tokens=12, table=table, stats=experience))
        played.begin()
        steps.append(played.finish.stats["forwards"])
    assert steps[1] < steps[0]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_many_drafts_in_every_step_change_no_token(sampling: SamplingParams) -> None:
    """The tables are full of another text's successors, and stay from answer to answer."""
    table, experience = LookupTable(VOCAB), OnlineStats()
    strategy = Strategy("greedy drafts", always(24), "one side", "front")  # type: ignore[arg-type]
    accepted = 0.0
    for seed in range(6):
        this = job(strategy, "cloud", sampling)
        config = changed(this.config, table=table, stats=experience)
        answer = Simulation(replace(this, config=config), engines(), seed=seed).run()
        expected = oracle.continued_alone(engines()["cloud"], BRANCHES["cloud"], [], sampling, MAX_TOKENS, EOS)
        assert answer.tokens == expected
        assert answer.finished is not None
        accepted += answer.finished.stats["accepted"]
    assert accepted > 0  # or nothing has been tried
