"""The verifiers that accept or reject: through both machines, every token has the cloud's distribution.

Over many seeds, while messages are delayed, lost, repeated and reordered, and the link is cut and mended: the device in
front waits for the cloud then, and a cloud in front goes on alone, so that all tokens are of the cloud.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab.simulation import Network, Simulation
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.sampler import SamplingParams, filter_top, process_logits
from paceline.core.verification import VerifierName
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import Branch, Side
from paceline.strategies.registry import STRATEGIES
from tests.core.chi_square import assert_drawn_from
from tests.depth import DEPTH
from tests.strategies.cases import VOCAB, Manner, job

NUM_SEEDS = 200 * DEPTH
LENGTH = 3
PROMPT = tuple(b"th")
BRANCHES: dict[Side, tuple[Branch, ...]] = {side: (Branch(PROMPT, None),) for side in ("cloud", "device")}
FILTERED = SamplingParams(temperature=0.8, top_p=0.8, top_k=5, frequency_penalty=0.7, min_p=0.02)
NETWORKS = {"in order": Network((0.01, 0.03)), "hostile": Network((0.0, 0.3), reorders=True, loss=0.15, duplicate=0.2)}


def models() -> dict[Side, Engine]:
    """Both differ, and share most of what they predict."""
    return {"cloud": FakeEngine(seed=1, spread=0.3), "device": FakeEngine(seed=1, spread=0.6)}


class TextDistribution:
    """The cloud's distribution after a prefix, from a fresh prefill."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._engine, self._sampling = models()["cloud"], sampling
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def after(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self._known:
            batch = Batch((Segment(SeqId(1), 0, (*PROMPT, *prefix)),))
            (row,) = self._engine.forward(batch).dists[0]
            self._engine.release(SeqId(1))
            final = filter_top(process_logits(row, self._sampling, Counter(prefix)), self._sampling)
            probs = np.zeros(VOCAB)
            probs[final.ids] = final.probs / final.probs.sum()
            self._known[prefix] = probs
        return self._known[prefix]

    def check(self, texts: Counter[tuple[int, ...]]) -> None:
        """Each place by itself, and the first two together."""
        for place in range(LENGTH):
            counts, expected = np.zeros(VOCAB), np.zeros(VOCAB)
            for text, count in texts.items():
                counts[text[place]] += count
                expected += count * self.after(text[:place])
            # given the prefixes that occurred: sums of multinomials, no wider than one of the mean
            assert_drawn_from(counts.astype(np.int64), expected / expected.sum())
        pairs, expected = np.zeros((VOCAB, VOCAB), dtype=np.int64), np.zeros((VOCAB, VOCAB))
        first = self.after(())
        for text, count in texts.items():
            pairs[text[0], text[1]] += count
        for token in np.flatnonzero(first):
            expected[token] = first[token] * self.after((int(token),))
        assert_drawn_from(pairs.ravel(), expected.ravel())


class Flap:
    """Cuts the link now and then, and mends it soon."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"flap {seed}")

    def __call__(self, world: Simulation) -> None:
        draw = self._chance.random()
        if draw < 0.04:
            world.cut()
        elif draw < 0.3:
            world.mend()


WHO: tuple[tuple[VerifierName, Side], ...] = (("rejection", "device"), ("truncated", "device"), ("truncated", "cloud"))
FIRST = {("rejection", "device", "hostile"), ("truncated", "cloud", "hostile")}  # with overlap, also in `make check`


def cases() -> list[Any]:
    """Each verifier and front on both networks, overlapping or in steps, at temperature 1 or filtered: every two of
    these occur together."""
    found: list[Any] = []
    for number, who in enumerate(WHO):
        for network in NETWORKS:
            hostile = network == "hostile"
            case = (*who, network, hostile == (number != 1), hostile != (number == 2))
            marks = [] if (*who, network) in FIRST else [pytest.mark.slow]
            found.append(pytest.param(*case, marks=marks, id=" ".join(map(str, case))))
    return found


@pytest.mark.parametrize(("verifier", "front", "network", "overlap", "filtered"), cases())
def test_every_token_has_the_clouds_distribution(
    verifier: VerifierName, front: Side, network: str, overlap: bool, filtered: bool
) -> None:
    sampling = FILTERED if filtered else SamplingParams()
    # `mass` cuts much of what is drafted; rows of several drafts, so that places behind accepted ones are examined;
    # `least`, since with forwards of equal length the cloud alone is faster
    options = (("verifier", verifier), ("mass", 0.9), ("overlap", overlap), ("gate", False), ("least", 1))
    manner = Manner(options=options)
    texts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0.0
    stats = OnlineStats()
    for seed in range(NUM_SEEDS):
        this = job(
            STRATEGIES["draft_verify"],
            front,
            replace(sampling, seed=seed),
            branches=BRANCHES,
            max_tokens=LENGTH,
            eos_ids=frozenset(),
            manner=manner,
            awaited=front == "device",
            stats=stats,
        )
        world = Simulation(
            this,
            models(),
            seed=seed,
            network=NETWORKS[network],
            search={"cloud": 0.1},  # so that there are drafts for the first place, too
        )
        texts[tuple(world.run(Flap(seed) if network == "hostile" else None).tokens)] += 1
        finished = world.session("cloud").finished
        if finished is not None:
            accepted, drafted = accepted + finished.stats["accepted"], drafted + finished.stats["drafted"]
    assert accepted > NUM_SEEDS / 5 and drafted - accepted > NUM_SEEDS / 20, "drafts were verified"
    TextDistribution(sampling).check(texts)
