"""Which rows run in the next forward pass: the segments of many sequences merged into one ragged batch.

No phases: a prefill is a long chain, cut into pieces under the row budget so that decodes and trees never wait for
it; a tree is never cut. Oldest first, and the oldest of all always moves, so nothing starves. Knows neither engine
nor clock. The caller runs each batch before it asks for the next. After Orca (Yu et al. 2022) and Sarathi (Agrawal et
al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.segments import Batch, Segment, SeqId


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment, or one piece of a chain that was cut: its outputs follow those of the pieces before it."""

    key: int
    segment: Segment
    final: bool  # the last piece of what was added under `key`


@dataclass(frozen=True, slots=True)
class Scheduled:
    pieces: tuple[Piece, ...]  # of distinct sequences
    refused: tuple[int, ...] = ()  # keys of what can never fit; dropped

    @property
    def batch(self) -> Batch:
        return Batch(tuple(piece.segment for piece in self.pieces))


@dataclass(slots=True)
class _Pending:
    key: int
    segment: Segment
    ready: int = 0  # first rows that need room, but no forward
    done: int = 0  # rows already scheduled

    @property
    def rows(self) -> int:
        """Still to be run."""
        return len(self.segment.tokens) - max(self.done, self.ready)

    @property
    def end(self) -> int:
        return self.segment.start + len(self.segment.tokens)

    @property
    def start(self) -> int:
        return self.segment.start + self.done


class StepScheduler:
    """Pending segments in order of arrival.

    token_budget: rows per step, at least 2; a step exceeds it only by a tree that is larger than it or that stands
    beside a prefill. max_segments: at least 2. block_size: granularity of the engine's memory, in rows.
    A chain begins only when all of its rows have room, so that what has begun can end. Rows of sequences the scheduler
    never saw, and copies that forks cause, are not accounted for: there the engine's own refusal remains.
    """

    def __init__(self, token_budget: int, max_segments: int, *, block_size: int = 1) -> None:
        if token_budget < 2 or max_segments < 2 or block_size < 1:
            raise ValueError(f"a step needs room for two: {token_budget} rows, {max_segments} segments")
        self._budget = token_budget
        self._max_segments = max_segments
        self._block_size = block_size
        # A chain above this is long: it is cut, and together the long ones are sure of this many rows a step.
        self._quantum = max(1, token_budget // 4)
        self._pending: dict[int, _Pending] = {}  # by key, in order of arrival
        self._holders: set[SeqId] = set()  # sequences with rows written, as far as seen from here
        self._capacity = 0  # the most rows that were ever free

    @property
    def idle(self) -> bool:
        return not self._pending

    def add(self, key: int, segment: Segment, *, ready: int = 0) -> None:
        """Segments of one sequence run in the order they are added. Raises ValueError for a key in use.

        ready: how many first rows of a chain the caller has from elsewhere. Its first piece comes without them when
        there is room for all; the caller writes them before it runs that piece.
        """
        if key in self._pending:
            raise ValueError(f"key {key} is pending already")
        if ready and not (0 < ready < len(segment.tokens) and segment.parents is None):
            raise ValueError(f"{ready} rows cannot be ready of {segment}")
        self._pending[key] = _Pending(key, segment, ready)

    def last(self, seq: SeqId) -> int | None:
        """The key of the last pending segment of this sequence."""
        return next((key for key, item in reversed(self._pending.items()) if item.segment.seq == seq), None)

    def cancel(self, seq: SeqId, from_row: int = 0) -> list[int]:
        """Rows of this sequence from `from_row` on will not be run. Returns the keys of what is dropped.

        A chain that begins below `from_row` is shortened to end there and keeps its key: later segments rely on its
        rows. With `from_row` 0 the sequence counts as released.
        """
        if from_row <= 0:
            self._holders.discard(seq)
        dropped = []
        for item in [item for item in self._pending.values() if item.segment.seq == seq]:
            segment = item.segment
            if segment.start + len(segment.tokens) <= from_row:
                continue
            if item.start >= from_row or segment.parents is not None:
                del self._pending[item.key]
                dropped.append(item.key)
            else:
                tokens = segment.tokens[: from_row - segment.start]
                item.segment = Segment(seq, segment.start, tokens, None, segment.logits)
                if item.ready >= len(tokens):
                    item.ready = 0
        return dropped

    def next_batch(self, free_rows: int | None) -> Scheduled | None:
        """The next step, and what is refused. None: nothing is pending, or nothing fits before something is released.

        free_rows: rows the engine can still write, None without a bound. What needs more than were ever free is
        refused. If all sequences that hold rows wait for more, the youngest of them is: else none would ever move.
        """
        refused = self._hopeless(free_rows)
        heads = list(self._heads())
        pieces = self._fill(self._with_room(heads, free_rows))
        if not pieces and not refused and heads:
            waiting = {item.segment.seq: item for item in heads}
            if self._holders and self._holders <= waiting.keys():
                victim = [item for item in heads if item.segment.seq in self._holders][-1]
                refused = self._drop_with_followers(victim.segment.seq)
        if not pieces and not refused:
            return None
        return Scheduled(tuple(pieces), tuple(refused))

    def check(self) -> None:
        assert all(item.rows > 0 for item in self._pending.values()), self._pending
        assert all(key == item.key for key, item in self._pending.items()), self._pending
        assert all(item.done == 0 or item.segment.parents is None for item in self._pending.values()), self._pending
        begun = [item.segment.seq for item in self._pending.values() if item.done]
        assert len(set(begun)) == len(begun), begun

    def _heads(self) -> Iterator[_Pending]:
        """The first pending segment of each sequence, oldest first."""
        seen: set[SeqId] = set()
        for item in self._pending.values():
            if item.segment.seq not in seen:
                seen.add(item.segment.seq)
                yield item

    def _hopeless(self, free_rows: int | None) -> list[int]:
        """Drop and return what could not run even alone, and what would follow it."""
        if free_rows is None:
            return []
        self._capacity = max(self._capacity, free_rows)
        too_long = [item.segment.seq for item in self._pending.values() if self._ceil(item.end) > self._capacity]
        return [key for seq in dict.fromkeys(too_long) for key in self._drop_with_followers(seq)]

    def _drop_with_followers(self, seq: SeqId) -> list[int]:
        keys = [key for key, item in self._pending.items() if item.segment.seq == seq]
        for key in keys:
            del self._pending[key]
        return keys

    def _with_room(self, heads: list[_Pending], free_rows: int | None) -> list[_Pending]:
        """Those that may run. Behind one that waits for room no new sequence begins, or small ones would overtake it
        for ever; sequences that hold rows go on, because only their end makes room."""
        if free_rows is None:
            return heads
        left = free_rows - sum(self._cost(item) for item in heads if item.done)
        admitted, waits = [], False
        for item in heads:
            if item.done:
                admitted.append(item)
            elif self._cost(item) <= left and (item.start > 0 or not waits):
                left -= self._cost(item)
                admitted.append(item)
            else:
                waits = True
        return admitted

    def _fill(self, admitted: list[_Pending]) -> list[Piece]:
        """Short ones in order while they fit beside the share of the long ones; these get what is left, in order."""
        long = [item for item in admitted if item.segment.parents is None and item.rows > self._quantum]
        short = [item for item in admitted if item.segment.parents is not None or item.rows <= self._quantum]
        left = self._budget - (self._quantum if long else 0)
        places = self._max_segments - (1 if long else 0)
        pieces: list[Piece] = []
        for item in short[:places]:
            if pieces and item.rows > left:
                break
            left -= item.rows
            pieces.append(self._cut(item, item.rows))
        left = max(left, 0) + self._quantum
        for item in long[: self._max_segments - len(pieces)]:
            if left == 0:
                break
            rows = min(item.rows, left)
            left -= rows
            pieces.append(self._cut(item, rows))
        return pieces

    def _cut(self, item: _Pending, rows: int) -> Piece:
        """The next `rows` rows, as a segment of its own."""
        whole, final = item.segment, rows == item.rows
        segment, first = whole, max(item.done, item.ready)
        if first or not final:
            tokens = whole.tokens[first : first + rows]
            logits = whole.logits if final or whole.logits == "all" else "none"
            segment = Segment(whole.seq, whole.start + first, tokens, None, logits)
        item.done = first + rows
        self._holders.add(whole.seq)
        if final:
            del self._pending[item.key]
        return Piece(item.key, segment, final)

    def _cost(self, item: _Pending) -> int:
        """Rows the engine must take from its free ones for all that is left of it."""
        return self._ceil(item.end) - self._ceil(item.start)

    def _ceil(self, rows: int) -> int:
        return -(-rows // self._block_size) * self._block_size
