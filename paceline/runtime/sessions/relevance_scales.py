"""Whether the relevance of two sides' documents can be compared: the same embedder and temperature at both.

Where it cannot, the documents of each side together weigh the same (`PromptSet.with_equal_sides`), until the text shows
which predict it better. Not handled: a link that comes with another scale in mid-answer; the weights stay.
"""

from __future__ import annotations

import logging

from paceline.rag.store.documents import DocumentStore
from paceline.wire.identity_messages import RelevanceScale

log = logging.getLogger("paceline.node")

EQUAL_WEIGHTS = "the documents of both sides weigh the same, since their"


def scale_of(store: DocumentStore | None, temperature: float) -> RelevanceScale | None:
    return None if store is None else RelevanceScale(store.embedder.fingerprint, temperature)


def difference(own: RelevanceScale | None, peer: RelevanceScale | None) -> str:
    """A clause that says what differs between two sides; empty where nothing does, or a side keeps no documents."""
    if own is None or peer is None or own == peer:
        return ""
    if own.embedder != peer.embedder:
        return f"{EQUAL_WEIGHTS} embedders differ"
    return f"{EQUAL_WEIGHTS} relevance temperatures differ ({own.temperature:g} and {peer.temperature:g})"


class PeerScales:
    """What peers have told, by their names: a peer that links anew stays who it is. own: this side's scale."""

    def __init__(self, own: RelevanceScale | None) -> None:
        self._own = own
        self._told: dict[str, RelevanceScale | None] = {}

    def told(self, peer: str, scale: RelevanceScale | None) -> None:
        """Of a new link. A difference is logged once, though links come and go."""
        is_news = self._told.get(peer) != scale
        self._told[peer] = scale
        if is_news and (different := self.difference(peer)):
            log.warning("in answers with %s %s", peer, different)

    def difference(self, peer: str | None) -> str:
        """As `difference`, between this side and what the peer told last."""
        return "" if peer is None else difference(self._own, self._told.get(peer))
