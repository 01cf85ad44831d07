"""One row's token: what an engine is asked for in place of a distribution, and the reference for its answer.

`sample_row` is the definition. An engine that has a vocabulary's logits on its device samples many rows in one pass
(`engine.sampling`) and must return the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist, IdArray, best_indices
from paceline.core.sampling.row_head import RowHead
from paceline.core.sampling.sampler import SamplingParams, apply_mask, filter_top, process_logits, sample


class RowSampling(msgspec.Struct, frozen=True, eq=False):
    """How to sample the token after one row."""

    params: SamplingParams
    position: int  # absolute output position: that of the noise
    vocab_size: int  # of the tokenizer; an engine's logits beyond it are padding
    counts: Mapping[int, int] = msgspec.field(default_factory=dict)  # of tokens in the output before this row
    prompt: IdArray | None = None  # distinct ids of the prompt, where the repetition penalty needs them
    allowed: NDArray[np.bool_] | None = (
        None  # (vocab_size or more,) under a constraint, with at least one id; None: all
    )
    num_top: int = 0  # ids of the row's head to return as well

    @property
    def changes_logits(self) -> bool:
        """True if ids get other logits than the model's, apart from the temperature."""
        return self.allowed is not None or bool(self.params.logit_bias) or self.params.looks_back


class SampledRow(msgspec.Struct, frozen=True, eq=False):
    token: int
    top: Dist | None = None  # the `num_top` most probable ids at temperature 1, without penalties; None: not wanted
    branch_probs: tuple[float, ...] = ()  # of several branches: the token's probability in each, without penalties
    head: RowHead | None = None  # of the mixture, processed; None: not wanted, or `dists` must be read
    branch_heads: tuple[
        Dist, ...
    ] = ()  # where heads are wanted: what `decayed_evidence` needs of each branch, as `branch_probs`
    dists: Callable[[], tuple[Dist, ...]] | None = None  # likewise: each branch's distribution, read when called


def sample_row(dist: Dist, row: RowSampling) -> SampledRow:
    """The reference. dist: dense, at temperature 1, before any processing."""
    plain = dist.within(row.vocab_size)
    masked = plain if row.allowed is None else apply_mask(plain, row.allowed)
    processed = process_logits(masked, row.params, row.counts, row.prompt)
    token = sample(filter_top(processed, row.params), row.params, row.position)
    return SampledRow(token, head(plain, row.num_top) if row.num_top else None)


def head(dist: Dist, k: int) -> Dist:
    """The k most probable ids; of equals the lowest. Those of probability 0 are left out."""
    places = best_indices(dist.probs, k)
    places = np.sort(places[dist.probs[places] > 0.0])
    probs = dist.probs[places]
    return Dist(dist.ids[places], probs, max(1.0 - float(probs.sum()), 0.0))
