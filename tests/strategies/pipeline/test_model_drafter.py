"""`pipeline` with a draft model: any model leaves the text, forwards are of new nodes, a failure is survived."""

from __future__ import annotations

from typing import Any

import pytest

from lab.baselines.flowspec import WAYS, strategy_of
from lab.engines import Arbitrary, Noisy, WrappedEngine
from lab.simulation import SimulatedSession, Simulation, StageTimes
from paceline.core.batching.segment import Batch
from paceline.engine.base import Engine, Output
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Options
from tests.strategies.cases import BRANCHES, MAX_TOKENS, SAMPLINGS, Manner, engines, job
from tests.strategies.conformance.laws import alone
from tests.strategies.pipeline.worlds import ALONE, simulated

FULL = Options(rescoring=False)


def target() -> FakeEngine:
    return FakeEngine(seed=1, spread=0.3)


def drafted(draft: Engine, way: str = "full", *, stages: int = 3, draft_s: float = 0.1, **options: Any) -> Simulation:
    """One answer of `target` in stages that take 1 s, with a hop of 0.1 s."""
    times = StageTimes(stages, lambda _: 1.0, 0.1)
    return simulated(strategy_of(way), FULL, stages=times, draft=(draft, draft_s), **options)


class Counting(WrappedEngine):
    """Counts what it computes, and fails from a forward on."""

    def __init__(self, inner: Engine, fails_at: int | None = None) -> None:
        super().__init__(inner)
        self.forwards = self.rows = 0
        self._fails_at = fails_at

    def forward(self, batch: Batch) -> Output:
        self.forwards += 1
        if self._fails_at is not None and self.forwards >= self._fails_at:
            raise EngineError("out of memory")
        self.rows += batch.num_rows
        return super().forward(batch)


DRAFTS = {
    "the target itself": target,
    "often wrong": lambda: Noisy(target(), 0.3),
    "another": lambda: FakeEngine(seed=9, spread=0.5),
    "anything at all": lambda: Arbitrary(FakeEngine(seed=3)),
}


def stats(answer: SimulatedSession) -> dict[str, float]:
    assert answer.finished is not None
    return dict(answer.finished.stats)


CASES = [*((draft, "full") for draft in DRAFTS), *(("often wrong", way) for way in WAYS if way != "full")]
SHORT = 10  # tokens


@pytest.mark.parametrize(("draft", "way"), CASES)
def test_text_is_the_target_s_for_any_draft_model(draft: str, way: str) -> None:
    """A slow draft model's drafts come late, for contexts that have gone by."""
    for (name, sampling), draft_s in zip(SAMPLINGS.items(), (0.1, 0.02, 1.7), strict=True):
        expected = simulated(STRATEGIES["autoregressive"], sampling=sampling, tokens=SHORT).run(checks=False).tokens
        stages = 1 if name == "filtered" else 3
        world = drafted(DRAFTS[draft](), way, sampling=sampling, draft_s=draft_s, stages=stages, tokens=SHORT)
        assert world.run(checks=False).tokens == expected, name


@pytest.mark.parametrize("rescoring", [False, True])
def test_documents_are_read_by_the_draft_model_too(rescoring: bool) -> None:
    sampling, manner = SAMPLINGS["sampled"], Manner(rescoring=rescoring)
    request = job(STRATEGIES["pipeline"], "cloud", sampling, manner=manner)
    draft = Counting(FakeEngine(seed=1, spread=0.5))
    times = StageTimes(2, lambda _: 1.0)
    world = Simulation(request, engines(), stages={"cloud": times}, drafts={"cloud": (draft, 0.1)})
    assert world.run().tokens == alone("cloud", sampling, manner, MAX_TOKENS)
    assert draft.rows > sum(len(branch.prompt) for branch in BRANCHES["cloud"])


def test_a_model_that_is_always_right_fills_the_pipe() -> None:
    """A token takes less than a turn, where it takes three without drafts."""
    world = drafted(target(), tokens=40, eos_ids=frozenset())
    answer = world.run(checks=False)
    found = stats(answer)
    assert found["accepted"] >= 33 and found["rounds"] <= 6  # tables guess too, before the rates are known
    assert world.now < 0.45 * 40 * 3 * 1.1


def test_only_new_nodes_are_computed() -> None:
    draft = Counting(Noisy(target(), 0.2))
    answer = drafted(draft, eos_ids=frozenset()).run(checks=False)
    assert stats(answer)["draft_forwards"] == draft.forwards
    computed = draft.rows - len(ALONE["cloud"][0].prompt)
    # A frontier of eight at most; trees that were drafted anew would take ten times their depth.
    assert computed <= 8 * draft.forwards and draft.forwards <= 8 * len(answer.tokens)


@pytest.mark.parametrize("fails_at", [1, 2, 9])
def test_a_draft_model_that_fails_leaves_the_answer_to_the_tables(fails_at: int) -> None:
    expected = simulated(STRATEGIES["autoregressive"]).run(checks=False).tokens
    draft = Counting(Noisy(target(), 0.2), fails_at)
    answer = drafted(draft).run(checks=False)
    assert answer.tokens == expected and draft.forwards == fails_at


def test_a_prompt_or_an_answer_longer_than_the_draft_model_s_context() -> None:
    expected = simulated(STRATEGIES["autoregressive"]).run(checks=False).tokens
    prompt = len(ALONE["cloud"][0].prompt)
    for positions in (prompt - 1, prompt, prompt + 1, prompt + 10):
        draft = Counting(FakeEngine(seed=1, spread=0.3, max_positions=positions))
        assert drafted(draft).run(checks=False).tokens == expected
        assert bool(draft.forwards) == (positions > prompt)
