"""Options of strategies, as an opening carries them and machines are configured with them.

Those of the strategies in this package that need more than the common ones are here or beside their machines.
"""

from __future__ import annotations

from typing import Annotated, Self

import msgspec

from paceline.core.offloading import Unit
from paceline.core.side import Side
from paceline.core.stretches import MAX_STRETCH
from paceline.wire.messages import Name, SentPart


class DraftLimits(SentPart, frozen=True):
    """Limits of a side's draft tree."""

    width: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4  # drafts for each next token; 1 makes chains, as in DRAGON
    rows: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16  # in one forward of one branch
    ahead: Annotated[int, msgspec.Meta(ge=0, le=256)] = 32  # tokens beyond the last target; 0: token by token
    whole_sequences: bool = False  # send chains of `ahead` drafts as a whole, not each draft once computed


class Options(SentPart, frozen=True):
    """Options of a strategy, carried whole by request, opening and machine. A strategy with more options subclasses
    this."""

    rescoring: bool = True  # document scores are updated with the text, see `core.aggregation.weights.decayed_evidence`
    drafting: DraftLimits = DraftLimits()

    @property
    def stats_kind(self) -> str:
        """Kind of answers that share measured statistics, see `core.drafting.budget.OnlineStats`."""
        return ""

    @property
    def energy_budget(self) -> tuple[float, Unit] | None:
        """The request's energy budget, J a unit, as `core.offloading.EnergyQueue` keeps it; None: none."""
        return None

    @property
    def stretch(self) -> int:
        """Tokens between two searches for documents, see `core.stretches`; 0: there is one search."""
        return 0

    @property
    def alone(self) -> Side | None:
        """The side that writes alone where neither has found a document; None: both write."""
        return None

    def in_one_stretch(self) -> Self:
        """The same options with one search."""
        return self


DEFAULT_OPTIONS = Options()


class AggregateOptions(Options, frozen=True):
    """Options of `aggregate`."""

    aggregator: Name = ""  # empty: `aggregate` selects one
    needs_dists: bool = False  # distributions are needed for logprobs, not only to choose the token
    # Tokens after which each side searches again, with the question and the answer so far; 0: never.
    search_every: Annotated[int, msgspec.Meta(ge=0, le=MAX_STRETCH)] = 0
    writer: Side | None = None  # see `alone`

    @property
    def stretch(self) -> int:
        return self.search_every

    @property
    def alone(self) -> Side | None:
        return self.writer

    def in_one_stretch(self) -> Self:
        return msgspec.structs.replace(self, search_every=0)

    @property
    def stats_kind(self) -> str:
        return self.aggregator
