"""What happened in one answer, by side and time, for a client that asks for it.

Noted where everything of an answer passes: what its machine counts, by the driver; its messages, where their bytes are
counted; its tokens, and a peer that is lost or back, by the session; searches and the choice of the strategy, by the
preparation. Kinds, sides, numbers and times alone: no text, no name of a document, and nothing that a peer has not sent
anyway. The numbers of each kind add up to those of the answer's report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from paceline.runtime.service import Moment
from paceline.strategies.base import SIDES, Event, Retrieved, Sampled, Scored, Side, other
from paceline.wire.messages import RetrievedPassages, SessionFrame

MAX_MOMENTS: Final = 320


class Timeline:
    """Moments of one answer. Those of one kind and side that are nearer to each other than `MAX_MOMENTS` of all allow
    are one, with the sum of their numbers; moments begin as short as a millisecond."""

    def __init__(
        self, side: Side, now: Callable[[], float], began: float | None = None, drafter: Side | None = None
    ) -> None:
        """side: that faces the client. now: s. began: when the answer was asked for; None: now. drafter: see
        `beside`."""
        self.side = side
        self.drafter = drafter or side
        self.now = now
        self._began = now() if began is None else began
        self._width = 1  # ms
        # When it began, its number, and how long it took, ms.
        self._found: dict[tuple[int, Side, str, str], tuple[float, float, float]] = {}
        self._counts: dict[str, float] = {}  # of the machine, so far
        self._prompts: tuple[int, float] | None = None  # their tokens, and when they were given to the machine
        self._asked: float | None = None  # s, of the first message since the peer's last one

    def note(
        self, kind: str, number: float = 1.0, of: str = "", *, side: Side | None = None, since: float | None = None
    ) -> None:
        """Something has happened. side: None: this one. since: s, when it began, where it took some time."""
        now = self.now()
        begun = now if since is None else since
        self._add(1e3 * (begun - self._began), side or self.side, kind, of, number, 1e3 * (now - begun))

    def _add(self, at: float, side: Side, kind: str, of: str, number: float, took: float) -> None:
        key = int(at) // self._width, side, kind, of
        known = self._found.get(key, (at, 0.0, 0.0))
        self._found[key] = min(at, known[0]), known[1] + number, known[2] + took
        while len(self._found) > MAX_MOMENTS:
            self._widen()

    def _widen(self) -> None:
        found, self._found, self._width = self._found, {}, 2 * self._width
        for (_, side, kind, of), (at, number, took) in found.items():
            self._add(at, side, kind, of, number, took)

    def chose(self, strategy: str, compared: Mapping[str, float]) -> None:
        """A strategy was chosen. compared: s a token that each way to the same text was taken to need; 0: of one that
        was to be measured."""
        self.note("strategy", of=strategy)
        for name, seconds in compared.items():
            self.note("cost_ms", 1e3 * seconds, name)

    def sent(self, message: SessionFrame, num_bytes: int) -> None:
        """A message to the peer."""
        self.note("sent", num_bytes, message.kind)
        self._asked = self.now() if self._asked is None else self._asked

    def received(self, message: SessionFrame, num_bytes: int) -> None:
        """A message of the peer. The first after one to it ends a round trip, whether it answers that one or not."""
        self.note("received", num_bytes, message.kind, side=other(self.side))
        if isinstance(message, RetrievedPassages):
            self.note("search", len(message.passages), side=other(self.side), since=self._asked)
        if self._asked is not None:
            self.note("round_trips", since=self._asked)
            self._asked = None

    def stepped(self, event: Event, figures: Mapping[str, float]) -> None:
        """A machine has taken an event. figures: its counts so far, which say whose drafts they are where several
        sides draft."""
        if isinstance(event, Retrieved):
            self._prompts = sum(len(branch.prompt) for branch in event.branches), self.now()
        elif self._prompts is not None and isinstance(event, Scored | Sampled):
            self.note("prefill", self._prompts[0], since=self._prompts[1])
            self._prompts = None
        before, self._counts = self._counts, dict(figures)
        for name, kind, side in self._kinds(figures):
            if more := figures.get(name, 0.0) - before.get(name, 0.0):
                self.note(kind, more, side=side)

    def _kinds(self, figures: Mapping[str, float]) -> Iterator[tuple[str, str, Side]]:
        """Which figures are told as which kind and side."""
        yield from ((name, name, self.side) for name in ("forwards", "handovers"))
        for kind in ("drafted", "accepted"):
            named = [(f"{kind}_{side}", kind, side) for side in SIDES if f"{kind}_{side}" in figures]
            yield from named or [(kind, kind, self.drafter)]

    def beside(self, drafter: Side) -> Timeline:
        """A timeline of a machine of this answer, which is told if that machine ends it. drafter: whose drafts the
        machine counts, where its figures do not say."""
        return Timeline(self.side, self.now, self._began, drafter)

    def moments(self, beside: Timeline | None = None) -> tuple[Moment, ...]:
        """In the order in which they began, with those of the machine that has ended the answer."""
        if beside is not None:
            self._take_over(beside)
        found = sorted(self._found.items(), key=lambda each: each[1][0])
        return tuple(
            Moment(round(at, 1), side, kind, of, number, round(took, 1))
            for (_, side, kind, of), (at, number, took) in found
        )

    def _take_over(self, beside: Timeline) -> None:
        while self._width < beside._width:
            self._widen()
        for (_, side, kind, of), (at, number, took) in beside._found.items():
            self._add(at, side, kind, of, number, took)
        beside._found.clear()  # once: an answer in stretches goes on with this timeline
