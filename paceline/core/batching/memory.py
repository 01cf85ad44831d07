"""What the scheduler knows of the engine's memory and may ask of it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.batching.segment import Segment, SeqId


class Memory:
    """Memory without a bound in which nothing is cached; the base of those that differ."""

    def free_rows(self) -> int | None:
        """Rows that can still be written if no two sequences share any; None: any number."""
        return None

    def held(self, seq: SeqId) -> int:  # noqa: ARG002  # for those that differ, here and below
        """Rows written of a sequence."""
        return 0

    def begin(self, key: int, segment: Segment) -> int | None:  # noqa: ARG002
        """Begin a sequence with this chain, for whose rows there is memory. Returns the number of its first rows that
        have now been written from a cache, fewer than there are, or None if it is to wait for another segment in
        progress. key: `RECOMPUTED` where the sequence has been preempted; it does not wait then."""
        return 0

    def preempt(self, seqs: Sequence[SeqId]) -> None:
        """Release the rows of these sequences; `rows_of` must know them."""

    def rows_of(self, seq: SeqId) -> Sequence[Segment]:  # noqa: ARG002
        """Segments that write the rows of a preempted sequence again: all that its later segments rely on."""
        return ()
