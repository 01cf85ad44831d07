"""The fake model over a vocabulary of a real one's size, so that messages have a real one's bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from lab.engines import WrappedEngine
from paceline.core.batching.segment import Batch
from paceline.core.sampling.dist import Dist
from paceline.engine.base import ModelInfo, Output
from paceline.engine.fake import VOCAB as FAKE_VOCAB
from paceline.engine.fake import FakeEngine

VOCAB = 151_936  # of Qwen2.5
TAIL = 0.05  # mass of the ids that the fake model does not know


class WideEngine(WrappedEngine):
    """Each of the fake model's ids is one among all ids, and the others have a Zipf tail of `TAIL`."""

    def __init__(self, seed: int, spread: float) -> None:
        super().__init__(FakeEngine(seed=seed, spread=spread, vocab_size=VOCAB))
        info = self._inner.info
        identity = sha256(f"{info.fingerprint} wide".encode()).hexdigest()
        self._info = replace(info, name="wide", fingerprint=identity)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        output = super().forward(batch)
        return Output.dense((tuple(map(_spread, dists)) for dists in output.dists), output.scored)


def _spread(dist: Dist) -> Dist:
    places, tail = _layout()
    probs = TAIL * tail
    probs[places] += (1.0 - TAIL) * dist.probs[:FAKE_VOCAB]
    return Dist.dense(probs)


@cache
def _layout() -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The place of each id of the fake model, which reads any id modulo its own number of them; and the tail."""
    rng = np.random.default_rng(0)
    places = np.arange(FAKE_VOCAB) + FAKE_VOCAB * rng.integers(0, VOCAB // FAKE_VOCAB, FAKE_VOCAB)
    tail = np.arange(1, VOCAB + 1) ** -1.2
    rng.shuffle(tail)
    return places, tail / tail.sum()
