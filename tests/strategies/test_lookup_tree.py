"""`lookup_tree`: drafts of tables, of texts and of a draft model, and where they do not pay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.baselines.lookup import FixedBudget
from lab.configs import a_config
from lab.engines import Arbitrary, Noisy
from lab.simulation import SimulatedRequest, SimulatedSession, Simulation
from lab.simulation.host import Accelerator
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable, TextMemory, bigram_key
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.runtime.lookup_tables import TableStore, read_table
from paceline.sealing import StoreSeal
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
    TimerFired,
    WakeAt,
)
from paceline.strategies.lookup_tree import LookupTree
from paceline.strategies.registry import STRATEGIES
from tests.strategies.cases import EOS, MAX_TOKENS, PROMPT, SAMPLINGS, VOCAB, Hand, Manner, engines, found, job, point
from tests.strategies.conformance.laws import alone
from tests.strategies.pipeline.worlds import ALONE

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


# ---- an owner's earlier answers as drafts ---------------------------------------------------------------------------
ANSWER = 60


def forwards_of_an_answer(table: LookupTable, name: str = "lookup_tree") -> tuple[float, list[int]]:
    """Of an answer that repeats nothing of itself, on an engine whose rows are free; and its tokens."""
    sampling = SamplingParams(temperature=1.0, seed=4)
    learnt: dict[str, Any] = {"table": table, "stats": OnlineStats(), "needs_dists": False}
    request = job(STRATEGIES[name], "cloud", sampling, branches=ALONE, max_tokens=ANSWER, eos_ids=frozenset(), **learnt)
    answer = Simulation(request, {"cloud": FakeEngine(seed=1, spread=0.9)}).run(checks=False)
    assert answer.finished is not None
    return answer.finished.stats["forwards"], answer.tokens


def test_an_answer_that_is_given_again_is_drafted_from_the_first_one(tmp_path: Path) -> None:
    seal = StoreSeal.new(bytes(32))

    def store() -> TableStore:
        return TableStore(tmp_path, "bytes", VOCAB, seal=seal)

    tables = store()
    before, text = forwards_of_an_answer(tables.table("anna"))
    assert tables.save() == 1
    (file,) = tmp_path.glob("owner-*")
    opened = read_table(file, seal)
    assert opened is not None and opened[1]["texts"][-1 - ANSWER : -1].tolist() == text
    assert opened[1]["texts"].tobytes() not in file.read_bytes()

    tables = store()  # another start
    assert forwards_of_an_answer(tables.table("ben"))[0] == before
    again, same = forwards_of_an_answer(tables.table("anna"))
    assert same == text and again < 0.5 * before
    assert asyncio.run(tables.erase("anna")) and not list(tmp_path.glob("owner-*"))
    assert tables.table("anna").memories == [] == store().table("anna").memories
    assert forwards_of_an_answer(tables.table("anna")) == (before, text)


def test_a_pipeline_remembers_too_and_a_table_over_another_reads_both() -> None:
    below = LookupTable(VOCAB)
    before, _ = forwards_of_an_answer(below, "pipeline")
    over = LookupTable(VOCAB, base=below)
    assert forwards_of_an_answer(over, "pipeline")[0] < 0.5 * before
    assert over.memories == [over.texts, below.texts]
    over.erase()
    assert over.memories == [below.texts]


def test_what_is_oldest_is_forgotten_and_cursors_begin_anew() -> None:
    table = LookupTable(VOCAB)
    table.texts = TextMemory(max_tokens=20)
    loop = [1, 2, 3, 4, 5, 6, 7, 8]
    table.texts.add(loop)
    while table.texts.catch_up(3):
        pass
    drafter = NgramDrafter(table, GREEDY)
    for token in loop[:5]:
        drafter.observe(token)
    assert drafter.draft(2, 0).tokens == (6, 7)
    for start in (100, 120):
        table.texts.add(range(start, start + 18))
    assert len(table.texts) == 20 and table.texts.is_behind
    drafter.observe(6)
    assert drafter.draft(2, 0).tokens == (), "the former texts are gone"
    assert table.texts.catch_up(5) and not table.texts.catch_up(100)


@pytest.mark.parametrize("texts", [np.array([1.5]), np.array([[1]], np.int32), np.array([VOCAB], np.int32)])
def test_damaged_texts_are_refused_and_change_nothing(texts: np.ndarray) -> None:
    table = LookupTable(VOCAB)
    table.record(3, [5], [0.5])
    saved = table.arrays()
    fresh = LookupTable(VOCAB)
    with pytest.raises(ValueError, match="text"):
        fresh.load(saved | {"texts": texts})
    assert len(fresh) == 0 and fresh.memories == []


# ---- `lookup_tree` with a draft model -------------------------------------------------------------------------------
TARGET_S = 0.1


def answers(
    name: str, temperature: float, seeds: Sequence[int], tokens: int, learnt: Mapping[str, Any], **fields: Any
) -> list[SimulatedRequest]:
    """Requests that end by their length alone. learnt: what they share."""
    return [
        job(
            STRATEGIES[name],
            "cloud",
            SamplingParams(temperature=temperature, seed=seed),
            max_tokens=tokens,
            eos_ids=frozenset(),
            **{**learnt, **fields},
        )
        for seed in seeds
    ]


def took(draft_s: float | None, count: int = 1, *, shared: bool = False) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Seconds of two turns of so many answers with common tables and statistics, and the texts. draft_s: of the draft
    model's forward; None: there is none. shared: both models compute on one accelerator."""
    learnt = {"table": LookupTable(VOCAB), "stats": OnlineStats(), "needs_dists": False}
    seconds, texts = 0.0, list[tuple[int, ...]]()
    for turn in range(2):
        world = Simulation(
            answers("lookup_tree", 1.0, range(10 * turn, 10 * turn + count), 60, learnt, branches=ALONE),
            {"cloud": FakeEngine(seed=1, spread=0.1)},
            forward={"cloud": lambda rows: TARGET_S + 0.0003 * rows},
            drafts={} if draft_s is None else {"cloud": (FakeEngine(seed=2, spread=0.1), draft_s)},
            accelerators={"cloud": Accelerator()} if shared else None,
        )
        world.run(checks=False)
        seconds += world.now
        texts += [tuple(answer.tokens) for answer in world.answers]
    return seconds, tuple(texts)


@pytest.mark.parametrize(("count", "shared"), [(1, True), (2, False)])
def test_a_cheap_model_that_is_often_right_makes_answers_faster_and_a_slow_one_costs_next_to_nothing(
    count: int, shared: bool
) -> None:
    plain_s, texts = took(None, count)
    cheap_s, with_cheap = took(0.01, count, shared=shared)
    slow_s, with_slow = took(TARGET_S, count, shared=not shared)
    assert with_cheap == with_slow == texts
    assert cheap_s < 0.9 * plain_s and slow_s < 1.07 * plain_s


@pytest.mark.parametrize("rescoring", [False, True])
def test_text_is_the_target_s_for_any_model_and_any_time_it_takes(rescoring: bool) -> None:
    manner = Manner(rescoring=rescoring)
    models: list[tuple[Engine, float]] = [
        (Noisy(engines()["cloud"], 0.3), 0.001),
        (Arbitrary(FakeEngine(seed=3)), 0.02),
        (FakeEngine(seed=1, spread=0.3, max_positions=60), 0.003),
    ]
    for sampling, model in zip(SAMPLINGS.values(), models, strict=True):
        request = job(STRATEGIES["lookup_tree"], "cloud", sampling, manner=manner, stats=OnlineStats())
        for _ in range(3):
            world = Simulation(request, engines(), drafts={"cloud": model})
            assert world.run().tokens == alone("cloud", sampling, manner, MAX_TOKENS)


# ---- `lookup_tree` on simulated engines, many answers at once -------------------------------------------------------
def saturated(rows: int) -> float:
    """Each row takes as long as the first."""
    return 0.0002 + 0.001 * rows


def memory_bound(rows: int) -> float:
    """Rows are free."""
    return 0.02 + 1e-6 * rows


def played(
    name: str,
    engine: Callable[[], Engine],
    forward: Callable[[int], float],
    temperature: float,
    count: int,
    *,
    needs_dists: bool = False,
) -> tuple[float, list[SimulatedSession]]:
    """Seconds until all answers have ended, on one engine and with common tables and statistics; and the answers."""
    learnt = {"table": LookupTable(VOCAB), "stats": OnlineStats(), "needs_dists": needs_dists}
    asked = answers(name, temperature, range(count), 150, learnt)
    world = Simulation(asked, {"cloud": engine()}, forward={"cloud": forward})
    world.run()
    return world.now, world.answers


@pytest.mark.parametrize(("count", "needs_dists"), [(1, True), (16, False)])
def test_where_rows_cost_and_drafts_fail_it_takes_as_long_as_plain_decoding(count: int, needs_dists: bool) -> None:
    def engine() -> Engine:
        return Arbitrary(FakeEngine(seed=1))

    plain_s, plain = played("autoregressive", engine, saturated, 1.0, count, needs_dists=needs_dists)
    ours_s, ours = played("lookup_tree", engine, saturated, 1.0, count, needs_dists=needs_dists)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in plain]
    assert ours_s <= 1.03 * plain_s


@pytest.mark.parametrize("count", [1, 16])
def test_where_rows_are_free_and_text_repeats_it_drafts(count: int) -> None:
    def engine() -> Engine:
        return FakeEngine(seed=1, order=1)

    plain_s, plain = played("autoregressive", engine, memory_bound, 0.0, count)
    ours_s, ours = played("lookup_tree", engine, memory_bound, 0.0, count)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in plain]
    assert ours_s < 0.6 * plain_s
    assert all(answer.finished is not None and answer.finished.stats["accepted"] > 0 for answer in ours)
