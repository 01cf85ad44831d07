"""Who answers where the other side's model is larger: this one while it is sure of what it writes, then that one.

A device begins by itself. Of its first tokens nothing is told, and nothing leaves it, before it is known who writes: if
it is too unsure of them for what the cloud would cost (`core.difficulty`), the text is the cloud's from the first token
on; if it grows unsure later, the cloud writes on behind what has been told. So a text is the device's up to some token,
and from there on what the strategy writes that `auto` had chosen. Where that token is depends on the prefix alone, for
one level and one state of what was learnt. What the cloud may see is settled before: none of this is asked where the
cloud may not read the question.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.core.difficulty import HEAD, HELD, UNTAUGHT, WEIGHTS, WORTHS, Correction, Look, Sureness, glance
from paceline.core.sampling.sampler import head
from paceline.core.side import HandoffLevel, Side
from paceline.runtime.service import Handoff
from paceline.secret_files import KeptJson
from paceline.strategies.base import Emit

FILE: Final = "handoff.json"
LEAST_EXAMINED: Final = 8  # drafts of an answer that is learnt from


class Outcomes:
    """What came of answers that were handed over, by pair of models, kept in the state directory over restarts. Methods
    may be called on any thread, one at a time."""

    def __init__(self, state_dir: Path | None = None) -> None:
        """state_dir: None: what is learnt ends with the program."""
        self._kept = KeptJson(None if state_dir is None else state_dir / FILE, "what handing over has taught", {})
        self._learnt: dict[str, Correction] = self._kept.read(self._corrections, {})

    def shift(self, pair: str) -> float:
        return self._learnt.get(pair, UNTAUGHT).shift

    def learn(self, pair: str, agreed: float) -> None:
        """Learn of an answer that the larger model has written. agreed: share of this side's drafts that it took."""
        self._learnt[pair] = self._learnt.get(pair, UNTAUGHT).after(agreed)

    def save(self) -> None:
        """Write it if it has changed."""
        self._kept.save({pair: [each.agreed, each.seen] for pair, each in dict(self._learnt).items()})

    @staticmethod
    def _corrections(found: dict[str, tuple[float, int]]) -> dict[str, Correction]:
        return {pair: Correction.of(float(agreed), int(seen)) for pair, (agreed, seen) in found.items()}


class Watch:
    """Reads the tokens of this side's own answer, holds the first ones back, and says when to hand it over."""

    def __init__(self, outcomes: Outcomes, pair: str, level: HandoffLevel, prompt: int) -> None:
        """pair: of models. level: not "off". prompt: tokens of it."""
        self._outcomes, self._pair = outcomes, pair
        self._worth, self._shift = WORTHS[level], outcomes.shift(pair)
        self._reading = Sureness(prompt)
        self._held: list[Emit] | None = []  # None: they have been told
        self._last = Look(1.0, 1.0)
        self._taken = 0.0  # risk at the last look that it passed
        self.over = False  # the other side writes the next token

    def take(self, token: Emit) -> list[Emit]:
        """What may be told now. Once it is `over` that is nothing."""
        self._read(token)
        if self._held is None:
            return [token] if self._passes() else []
        self._held.append(token)
        return self._let_go() if len(self._held) >= HELD else []

    def end(self, token: Emit | None) -> list[Emit]:
        """The text has ended, by this token if any. What may be told now."""
        if self._held is None:
            return []
        if token is not None:
            self._read(token)
        return self._let_go() if self._held else []

    def told(self, decided: Side, own: int) -> Handoff:
        """For the report. own: tokens of the answer that this side has written."""
        at = None if decided == "device" else own
        risk = self._taken if own else 0.0
        return Handoff(decided, at, self._last.chance, min(1.0, self._worth * self._last.tokens), own, risk)

    def learn(self, accepted: int, examined: int) -> None:
        """The other side has written: it was shown so many of this side's drafts, and took so many."""
        if examined >= LEAST_EXAMINED:
            self._outcomes.learn(self._pair, accepted / examined)

    def _read(self, token: Emit) -> None:
        if token.dist is not None:
            self._reading.add(glance(head(token.dist, HEAD), token.token))

    def _let_go(self) -> list[Emit]:
        held, self._held = self._held or [], None
        return held if self._passes() else []

    def _passes(self) -> bool:
        self._last = self._reading.look(WEIGHTS, self._shift)
        self.over = self._last.worth > self._worth
        self._taken = self._taken if self.over else self._last.risk
        return not self.over
