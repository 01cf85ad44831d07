"""Passages that agents read, with the place they come from, and evidence: what the answer is written from.

What is private stays so: evidence is private as soon as anything that its writer read is, cited or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Origin = Literal["device", "cloud", "web"]
Conversation = Sequence[Mapping[str, object]]  # role and content of each message
Prompt = list[Mapping[str, object]]  # likewise, for a chat template


@dataclass(frozen=True, slots=True)
class SourcePassage:
    """A passage of a document or of a page of the web. Its text is untrusted."""

    text: str
    side: Origin
    private: bool  # of a private document: no request to the web may come of it
    title: str = ""
    document_id: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A refined statement, or a passage as it is."""

    text: str
    sources: tuple[SourcePassage, ...]  # that it cites, distinct; empty: uncited
    private: bool  # anything that its writer read is
    origins: frozenset[Origin]  # of all that its writer read

    @classmethod
    def of(cls, passage: SourcePassage) -> Evidence:
        """A passage as it is, which is its own source."""
        return cls(passage.text, (passage,), passage.private, frozenset({passage.side}))

    @classmethod
    def from_reading(cls, text: str, cited: Iterable[SourcePassage], read: Sequence[SourcePassage]) -> Evidence:
        """A statement of an agent that read these passages."""
        private = any(passage.private for passage in read)
        return cls(text, tuple(dict.fromkeys(cited)), private, frozenset(passage.side for passage in read))

    @property
    def is_cited(self) -> bool:
        return bool(self.sources)


MIN_HALVED = 200  # characters: shorter texts are not worth reading in part


def fewer_passages(passages: tuple[SourcePassage, ...]) -> tuple[SourcePassage, ...] | None:
    """Without the last one, or half of the only one; None where nothing can go."""
    if len(passages) > 1:
        return passages[:-1]
    if passages and len(passages[0].text) >= 2 * MIN_HALVED:
        return (replace(passages[0], text=passages[0].text[: len(passages[0].text) // 2]),)
    return None


def less_evidence(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...] | None:
    """Without the last one; None where there is none."""
    return evidence[:-1] if evidence else None
