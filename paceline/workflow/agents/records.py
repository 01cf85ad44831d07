"""Passages that agents read, with the place they come from, and evidence: what the answer is written from.

What is private stays so: evidence is private as soon as anything that its writer read is, cited or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, Self, TypeVar

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


# What an agent is: a record of its stage, its prompt, its parser and its limit of tokens.


Decision = TypeVar("Decision")
Result_co = TypeVar("Result_co", covariant=True)


class AgentParser(Protocol[Decision, Result_co]):
    """Reads what an agent writes, piece by piece. No text raises, and how it is cut changes nothing.

    All decisions together, those of the fallback included, are what `feed` and `end` have returned.
    """

    @property
    def done(self) -> bool:
        """Nothing that follows would change the result: decoding may stop."""

    def feed(self, piece: str) -> list[Decision]:
        """Decisions that this piece of text, whole characters, completes."""

    def end(self) -> list[Decision]:
        """The text has ended: decisions of its last line, or those of the fallback. Later calls add nothing."""

    def result(self) -> Result_co:
        """All decisions, and how they came about. Complete after `end`."""


class AgentInputs(Protocol):
    """What an agent reads."""

    def shortened(self) -> Self | None:
        """With a little less to read; None where nothing can go."""


Inputs = TypeVar("Inputs", bound=AgentInputs)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Agent(Generic[Inputs, Decision, Result]):
    """One agent. A parser is made of the same inputs as its prompt, since it resolves their numbers."""

    stage: str  # as in `WorkflowBuilder`: the sub-stages are `STAGE.prefill` and `STAGE.decode`, or `STAGE public.…`
    max_tokens: int | None  # of its text; None: the limit of the request
    messages: Callable[[Inputs], Prompt]
    parser: Callable[[Inputs], AgentParser[Decision, Result]]

    def fitted(self, inputs: Inputs, fits: Callable[[Prompt], bool]) -> Inputs | None:
        """The inputs, shortened until their prompt fits a model's context; None where the shortest does not."""
        kept: Inputs | None = inputs
        while kept is not None and not fits(self.messages(kept)):
            kept = kept.shortened()
        return kept
