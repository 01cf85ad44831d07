"""A batch as one flat row of tokens, on the host: what every kind of forward is prepared from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.block_manager import SlotArray
from paceline.core.batching.segment import PlacedSegment

RowArray = NDArray[np.int64]


class SegmentSlots(msgspec.Struct, frozen=True):
    """One segment in the flat row, with the block table of its sequence."""

    segment: PlacedSegment
    first: int  # its first row in the flat row
    blocks: NDArray[np.int64]  # (enough for start + n rows,)

    @property
    def num_rows(self) -> int:
        return len(self.segment.tokens)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    segments: Sequence[SegmentSlots]
    tokens: RowArray  # (rows,)
    positions: RowArray  # (rows,)
    slots: SlotArray  # (rows,) where to store K and V of each row
    logits_rows: RowArray  # (wanted,) rows to score

    @classmethod
    def of(cls, segments: Sequence[SegmentSlots], slots: SlotArray) -> Self:
        tokens, positions = np.empty(len(slots), dtype=np.int64), np.empty(len(slots), dtype=np.int64)
        logits_rows: list[int] = []
        for each in segments:
            segment, rows = each.segment, slice(each.first, each.first + each.num_rows)
            tokens[rows] = segment.tokens
            if segment.parents is None:
                positions[rows] = np.arange(segment.start, segment.start + each.num_rows)
            else:
                positions[rows] = segment.positions()
            logits_rows += [each.first + row for row in segment.wanted]
        return cls(segments, tokens, positions, slots, np.array(logits_rows, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        return len(self.tokens)
