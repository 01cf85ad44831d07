"""Verdicts that came before those they follow, until the gap before them is closed."""

from __future__ import annotations

from paceline.wire.verify_messages import Rejected, Verdict

MAX_EARLY = 64  # verdicts that wait; the rest is asked for again
MAX_EARLY_BYTES = 1 << 18  # of all that wait, with their distributions; likewise


class EarlyVerdicts:
    """Bounded, since a peer may send any verdict it likes. Links keep the order, so of an honest one few wait."""

    def __init__(self) -> None:
        self._waiting: dict[int, Verdict] = {}  # by their start
        self._bytes = 0

    def add(self, verdict: Verdict, num_targets: int) -> None:
        """Keep a verdict; of two with one start the one that says more. num_targets: known so far."""
        kept = self._waiting.get(verdict.start)
        if kept is not None and _says(kept) > _says(verdict):
            return
        freed = 0 if kept is None else _size(kept)
        if verdict.start > num_targets:
            full = kept is None and len(self._waiting) >= MAX_EARLY
            if full or self._bytes - freed + _size(verdict) > MAX_EARLY_BYTES:
                return
        self._waiting[verdict.start] = verdict
        self._bytes += _size(verdict) - freed

    def pop(self, num_targets: int) -> Verdict | None:
        """A verdict that begins at or before the next target; None without one."""
        first = min(self._waiting, default=None)
        if first is None or first > num_targets:
            return None
        verdict = self._waiting.pop(first)
        self._bytes -= _size(verdict)
        return verdict


def _says(verdict: Verdict) -> tuple[int, bool]:
    return len(verdict.tokens), isinstance(verdict, Rejected)


def _size(verdict: Verdict) -> int:
    """Bytes of its tokens and distributions."""
    dists = list(verdict.dists)
    if isinstance(verdict, Rejected):
        dists += [dist for dist in (verdict.head, verdict.plain) if dist is not None]
    return len(verdict.tokens) + sum(len(dist.ids) + len(dist.probs) for dist in dists)
