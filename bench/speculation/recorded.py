"""Answers of a real model, recorded once, and an engine that plays them again: methods that must write one text are
compared without running the model for each.

A row on the text has the recorded distribution and token. Of a row off the text no method uses the token, since it
verifies along the text alone; its token is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.core.batching.segment import Batch, PlacedSegment, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling, SampledRow, SamplingParams, head, sample_row
from paceline.engine.base import Engine, Output, SampleRequest
from paceline.engine.fake import FakeEngine

from ..drafting.placing_engine import PlacingEngine

_OFF = Dist(np.array([0], dtype=np.int32), np.array([1.0]), 0.0)


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer. `dists[i]` and `tokens[i]` are those after i output tokens."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: tuple[int, ...]
    dists: tuple[Dist, ...]

    @staticmethod
    def of(engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams, count: int, vocab_size: int) -> Recording:
        """Plain decoding of so many tokens. The end of text must be banned by `sampling`."""
        seq = SeqId(1)
        tokens: list[int] = []
        dists: list[Dist] = []
        rows = prompt
        for position in range(count):
            (dist,) = engine.forward(Batch((Segment(seq, engine.length(seq), rows),))).dists[0]
            tokens.append(sample_row(dist, RowSampling(sampling, position, vocab_size)).token)
            dists.append(dist)
            rows = (tokens[-1],)
        engine.release(seq)
        return Recording(prompt, sampling, tuple(tokens), tuple(dists))

    @property
    def text(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Scored rows: the number of output tokens before each, -1 off the text."""

    recording: Recording
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def dists(self) -> tuple[Dist, ...]:
        last = len(self.recording.dists) - 1
        return tuple(self.recording.dists[min(place, last)] if place >= 0 else _OFF for place in self.places)


class RecordedEngine(PlacingEngine):
    """Plays one recording, in any number of sequences."""

    def __init__(self, recording: Recording, vocab_size: int) -> None:
        super().__init__(FakeEngine(vocab_size=vocab_size))
        self._recording = recording

    def forward(self, batch: Batch) -> Output:
        """Honest about rows: the inner engine fails for one that was never written."""
        known = [self._on_text(segment.seq) for segment in batch.segments]
        placed = self.run(Batch(tuple(msgspec.structs.replace(segment, logits="none") for segment in batch.segments)))
        rows = [
            self._places(segment, each, on_text)
            for segment, each, on_text in zip(batch.segments, placed, known, strict=True)
        ]
        return Output(tuple(_Rows(self._recording, places) for places in rows))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        answers: list[tuple[SampledRow, ...]] = []
        for request in requests:
            (parts,) = request.branches
            found = [self._sampled(place) for part in parts if isinstance(part, _Rows) for place in part.places]
            dists = [dist for part in parts for dist in part.dists()]
            answers.append(
                tuple(
                    SampledRow(token, head(dist, row.num_top) if row.num_top and dist is not _OFF else None)
                    for token, dist, row in zip(found, dists, request.rows, strict=True)
                )
            )
        return answers

    def _sampled(self, place: int) -> int:
        tokens = self._recording.tokens
        return tokens[place] if 0 <= place < len(tokens) else 0

    def _on_text(self, seq: SeqId) -> list[bool]:
        """For each open row of the tree: whether its path is a prefix of the recorded text."""
        tree = self._table.tree(seq)
        committed = self._table.length(seq) - len(tree.tokens)
        return self._continue([], tree.tokens, tree.parents, committed)

    def _continue(self, known: list[bool], tokens: Sequence[int], parents: Sequence[int], committed: int) -> list[bool]:
        text = self._recording.text
        on_text, depths = list(known), list[int]()
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if row >= len(known):
                position = committed + depths[row]
                follows = parent < 0 or on_text[parent]
                on_text.append(follows and position < len(text) and text[position] == token)
        return on_text

    def _places(self, segment: Segment, placed: PlacedSegment, known: list[bool]) -> tuple[int, ...]:
        first = len(self._recording.prompt) - 1
        if placed.parents is None:
            return tuple(segment.start + row - first for row in segment.logits_rows())
        tree_tokens = (*(0 for _ in known), *placed.tokens)  # those of open rows are not looked at again
        committed = placed.start - placed.num_open_rows
        on_text = self._continue(known, tree_tokens, placed.parents, committed)[len(known) :]
        positions = placed.positions()
        return tuple(positions[row] - first if on_text[row] else -1 for row in segment.logits_rows())
