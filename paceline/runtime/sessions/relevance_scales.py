"""Whether the relevance of two sides' documents can be compared: the same embedder and temperature at both.

Where it cannot, the documents of each side together weigh the same (`PromptSet.with_equal_sides`), until the text shows
which predict it better. Not handled: a link that comes with another scale in mid-answer; the weights stay.
"""

from __future__ import annotations

from paceline.rag.store.documents import DocumentStore
from paceline.wire.identity_messages import RelevanceScale

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
