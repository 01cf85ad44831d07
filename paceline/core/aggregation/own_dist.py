"""A side's own distribution after one prefix: the head that an engine hands over, and the whole on demand."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.ranking import best_margin, top_by_score
from paceline.core.sampling.row_head import RowHead
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample


class OwnDist:
    """The mixture over this side's documents, after `process_logits`, before `filter_top`."""

    __slots__ = ("_read", "_token", "_whole", "head")

    def __init__(self, head: RowHead, token: int, read: Callable[[], Dist]) -> None:
        """token: the side's own sample. read: the whole distribution, dense; takes milliseconds."""
        self.head: RowHead | None = head
        self._token: int | None = token
        self._read: Callable[[], Dist] | None = read
        self._whole: Dist | None = None

    @staticmethod
    def of(dist: Dist) -> OwnDist:
        """A distribution that is known as a whole. dist: dense."""
        own = OwnDist.__new__(OwnDist)
        own.head = own._token = own._read = None
        own._whole = dist
        return own

    @property
    def known(self) -> Dist:
        """The head's ids, or all of them: for drafts, which may be wrong."""
        if self.head is not None:
            return self.head.dist
        assert self._whole is not None
        return self._whole

    @property
    def whole(self) -> Dist:
        if self._whole is None:
            assert self._read is not None
            self._whole, self._read = self._read(), None
        return self._whole

    def token(self, params: SamplingParams, position: int) -> int:
        """The side's own sample, by its request's parameters."""
        if self._token is None:
            self._token = sample(filter_top(self.whole, params), params, position)
        return self._token

    def second(self, params: SamplingParams, position: int, *, within: float) -> int | None:
        """The id that would be sampled if `token` were not; None where it scores more than so many nats below it, or
        filters have changed the order. Read from `known`: right enough for drafts."""
        ids = self.known.ids[top_by_score(self.known, params, position, 2)].tolist()
        if len(ids) < 2 or ids[0] != self.token(params, position):
            return None
        return int(ids[1]) if best_margin(self.known, params, position, ids) <= within else None
