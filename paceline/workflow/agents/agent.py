"""What an agent is: a record of its stage, its prompt, its parser and its limit of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from paceline.workflow.agents.records import Prompt

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
