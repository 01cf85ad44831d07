"""A request that is prepared: all that its session needs to know."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.drafting.suffix_automaton import TextMemory
from paceline.core.sampling.sampler import Mask, Thinking
from paceline.runtime.service import GenerateRequest, Handoff
from paceline.runtime.sessions.handoff import Watch
from paceline.runtime.sessions.prompts import PromptSet
from paceline.runtime.sessions.routing import Costs
from paceline.strategies.base import Machine, Side
from paceline.wire.codec import constraint_to_wire, encode_options, sampling_to_wire
from paceline.wire.messages import ChatMessage, OpenSession, Options


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with its strategy, prompts and claim of memory, before anything runs."""

    request: GenerateRequest
    side: Side
    strategy: str
    reason: str  # for the choice of the strategy
    options: Options
    prompts: PromptSet
    max_new_tokens: int  # output tokens that fit the context
    limit: int  # output tokens of the answer, at most
    end: int  # of them, up to the end of this stretch; below `limit` a further stretch may follow
    missing: str | None  # "device_missing" or "cloud_missing" where a wanted peer is not linked
    peer_name: str | None  # the peer that may return; None where the strategy needs none
    cache_key: bytes = b""  # by which the peer recognises answers that may share KV
    mask: Mask | None = None  # of the request's constraint
    unanswered_mask: Mask | None = (
        None  # of an answer that says that no document answers, if the peer finds nothing either
    )
    thinking: Thinking | None = None  # that the answer may begin with
    claim: int = 0  # KV rows of all branches together
    salt: str | None = None  # of its KV; None: shared with no other answer
    predicted: TextMemory | None = None  # what the client expects the text to be
    draft_claim: int | None = None  # likewise of the draft model's KV; None: its machine is told of no such model
    refusals: tuple[str, ...] = ()  # as in `ModelInfo`
    nothing_found: str = ""  # who writes where the peer has not found anything either, as the end of the reason
    writer: Side | None = None  # that side: of the larger model
    costs: Costs | None = None  # told how long the answer took
    held: bool = False  # by a rule: no look-up table learns it
    watch: Watch | None = None  # of what this side begins by itself
    handoff: Handoff | None = None  # of what it has begun so
    outcome: Callable[[int, int], None] | None = None  # told how many of its drafts were accepted, and examined

    def opening(self, session: int, targets: Sequence[int], epoch: int) -> OpenSession:
        """Of the peer's session, from these output tokens on."""
        request = self.request
        template = request.prompt.template
        return OpenSession(
            session=session,
            strategy=self.strategy,
            messages=[ChatMessage(message["role"], message["content"]) for message in request.prompt.messages],
            query="",
            sampling=sampling_to_wire(request.sampling),
            max_tokens=self.limit,
            top_k_documents=request.sources.documents,
            privacy=request.joining.privacy,
            options=encode_options(self.options),
            targets=list(targets),
            epoch=epoch,
            constraint=constraint_to_wire(request.output.constraint),
            asker=request.account.asker,
            cache_key=self.cache_key,
            trace=request.account.trace,
            template=json.dumps(dict(template), ensure_ascii=False) if template else "",
        )


AloneWay = tuple[PreparedRequest, Callable[[], Machine]]
