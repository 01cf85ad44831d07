"""Stretches of an answer between two searches for documents. Pure."""

from __future__ import annotations

from typing import Final

MIN_STRETCH: Final = 8  # tokens: each stretch begins with a search and a round trip
MAX_STRETCH: Final = 131_072  # of the longest answer


def stretch_of(length: int, every: int, limit: int) -> tuple[int, int]:
    """Begin and end of the stretch in which the token at position `length` is.

    every: tokens of a stretch; 0: the whole answer is one. limit: tokens of the answer, which ends the last one sooner.
    """
    if every <= 0:
        return 0, limit
    begin = length // every * every
    return begin, min(limit, begin + every)
