"""`lookup_tree` on simulated engines, many answers at once: it drafts where that pays, and else costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lab.configs import changed
from lab.engines import Arbitrary
from lab.simulation import SimulatedRequest, SimulatedSession, Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import Side
from paceline.strategies.registry import STRATEGIES
from tests.strategies.cases import VOCAB, job

TOKENS = 150


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
    table, stats = LookupTable(VOCAB), OnlineStats()

    def request(seed: int) -> SimulatedRequest:
        sampling = SamplingParams(temperature=temperature, seed=seed)
        this = job(STRATEGIES[name], "cloud", sampling, max_tokens=TOKENS, eos_ids=frozenset())
        return replace(this, config=changed(this.config, table=table, stats=stats, needs_dists=needs_dists))

    hosts: dict[Side, Engine] = {"cloud": engine()}
    world = Simulation([request(seed) for seed in range(count)], hosts, forward={"cloud": forward})
    world.run()
    return world.now, world.answers


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("needs_dists", [False, True])
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


def test_where_rows_cost_and_every_draft_is_accepted_it_is_never_slower() -> None:
    """A row that yields a token costs as much as a step of its own: nothing to gain, and nothing to lose."""

    def engine() -> Engine:
        return FakeEngine(seed=1, order=1)

    plain_s, _ = played("autoregressive", engine, saturated, 0.0, 16)
    ours_s, _ = played("lookup_tree", engine, saturated, 0.0, 16)
    assert ours_s <= 1.03 * plain_s
