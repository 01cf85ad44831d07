"""Engines around another engine, for tests and benches: one that delegates everything, one that is wrong now and then,
and one of which nothing is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b, sha256

import numpy as np

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SampledRow
from paceline.engine.base import Engine, ModelInfo, Output, SampleRequest
from paceline.engine.fake import uniforms


class WrappedEngine:
    """Engine that delegates to `inner` and owns its sequences."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def forward(self, batch: Batch) -> Output:
        return self._inner.forward(batch)

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        return self._inner.sample(requests)

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        self._inner.prune(seq, keep, live, horizon)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._inner.truncate(seq, length)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        return self._inner.export_kv(seq, tokens)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        self._inner.import_kv(seq, rows)

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        return self._inner.begin(seq, tokens, salt, stored)

    def release(self, seq: SeqId) -> None:
        self._inner.release(seq)

    def length(self, seq: SeqId) -> int:
        return self._inner.length(seq)

    @property
    def block_size(self) -> int:
        return self._inner.block_size

    def free_rows(self) -> int | None:
        return self._inner.free_rows()

    def check(self) -> None:
        self._inner.check()


class Noisy(WrappedEngine):
    """Engine with wrong distributions on a share `rate` of the rows: an imperfect drafter.

    A function of the true distribution decides which rows are wrong, and how, so the engine contract still holds. A
    wrong distribution has the support of the true one, with the probabilities permuted.
    """

    def __init__(self, engine: Engine, rate: float) -> None:
        super().__init__(engine)
        self._rate = rate
        info = engine.info
        self._info = replace(
            info, name=f"noisy {info.name}", fingerprint=sha256(f"{info.fingerprint} {rate}".encode()).hexdigest()
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        output = super().forward(batch)
        return Output.dense((tuple(self._perturb(dist) for dist in dists) for dists in output.dists), output.scored)

    def _perturb(self, dist: Dist) -> Dist:
        digest = int.from_bytes(blake2b(dist.probs.tobytes(), digest_size=8).digest(), "little")
        support = np.flatnonzero(dist.probs)
        if len(support) < 2 or (digest >> 11) / 2.0**53 >= self._rate:
            return dist
        probs = dist.probs.copy()
        probs[support] = np.roll(dist.probs[support], 1 + digest % (len(support) - 1))
        return Dist(dist.ids, probs, dist.tail)


class Arbitrary(WrappedEngine):
    """Engine with arbitrary distributions: any token may follow any other, the end of text included.

    For tests that must hold for any model. Each distribution is a function of the one it replaces, so the engine
    contract still holds.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        identity = sha256(f"{engine.info.fingerprint} arbitrary".encode()).hexdigest()
        self._info = replace(engine.info, name=f"arbitrary {engine.info.name}", fingerprint=identity)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        output = super().forward(batch)
        return Output.dense((tuple(self._replace(dist) for dist in dists) for dists in output.dists), output.scored)

    @staticmethod
    def _replace(dist: Dist) -> Dist:
        key = int.from_bytes(blake2b(dist.probs.tobytes(), digest_size=8).digest(), "little")
        probs = np.log(uniforms(key, len(dist.ids))) ** 4  # uneven: a few tokens have most of the mass
        return Dist.dense(probs / probs.sum())
