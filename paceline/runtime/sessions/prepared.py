"""A request that is ready to be written, and what is kept of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from paceline.core.drafting.lookup_table import TextMemory
from paceline.core.sampling.sampler import Constraint, Mask, Thinking
from paceline.engine.base import ModelInfo
from paceline.runtime.service import AnswerRecord, Citation, GenerateRequest, Handoff, ReadPassage
from paceline.runtime.sessions.handoff import Watch
from paceline.runtime.sessions.output_text import Written
from paceline.runtime.sessions.prompts import PromptSet
from paceline.runtime.sessions.routing import Costs
from paceline.strategies.base import Machine, Side, other
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import constraint_to_wire, encode_options, sampling_to_wire
from paceline.wire.messages import ChatMessage, OpenSession, Options


def hashed(text: str | Sequence[int]) -> str:
    """Hash of a text or of a prompt's tokens, since documents may be removed."""
    return blake2b((text if isinstance(text, str) else repr(list(text))).encode(), digest_size=16).hexdigest()


def model_id(model: ModelInfo) -> str:
    """Equal where a model gives the same distributions."""
    return f"{model.fingerprint} {model.dtype} {model.backend}"


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
    unanswered_mask: Mask | None = None  # of an answer that says that no document answers, if the peer has none either
    unanswered_form: Constraint | None = None  # likewise
    models: tuple[str, str] = ("", "")  # this side's and the peer's, as in `AnswerRecord`
    thinking: Thinking | None = None  # that the answer may begin with
    claim: int = 0  # KV rows of all branches together
    removals: int = 0  # of documents, when its own were looked for
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
            sampling=sampling_to_wire(request.wish.sampling),
            max_tokens=self.limit,
            top_k_documents=request.wish.documents,
            privacy=request.wish.privacy,
            options=encode_options(self.options),
            targets=list(targets),
            epoch=epoch,
            constraint=constraint_to_wire(request.output.constraint),
            asker=request.account.asker,
            cache_key=self.cache_key,
            trace=request.account.trace,
            template=json.dumps(dict(template), ensure_ascii=False) if template else "",
        )

    def fault(self, degraded: str | None, approximate: str) -> str:
        """Why its answer cannot be computed again, as a sentence; or empty. approximate: as clients are told."""
        if approximate:
            return f"It is {approximate}."
        if degraded is not None and STRATEGIES[self.strategy].needs_peer:
            return f"The {other(self.side)} was missing or lost in it, and where is not kept."
        if self.handoff is not None and self.handoff.at is not None:
            return "The device has begun it, and the cloud has gone on."
        if any(passage.url for passage in (*self.prompts.passages, *self.prompts.peer_passages)):
            return "It has read pages of the web, which are not kept."
        return ""

    def record(self, written: Written, start: int, told: Sequence[Citation], *, ends: bool, fault: str) -> AnswerRecord:
        """What is kept of its answer. start: output tokens before this stretch. told: passages that the peer has read,
        as it says. ends, fault: as of `AnswerRecord`."""
        prompts = self.prompts
        form = self.unanswered_form if self.mask is self.unanswered_mask else self.request.output.constraint
        return AnswerRecord(
            side=self.side,
            model=self.models[0],
            strategy=self.strategy,
            options=msgspec.json.encode(self.options).decode(),
            sampling=self.request.wish.sampling,
            constraint=None if self.mask is None else form,
            messages=len(self.request.prompt.messages),
            limit=self.limit,
            prompts=[(hashed(branch.prompt), branch.score) for branch in prompts.branches],
            tokens=[*written.tokens[start:], *written.dropped],
            start=start,
            ends=ends,
            passages=[passage.chunk_id for passage in prompts.passages],
            others=[ReadPassage(each.peer_chunk or 0, each.score, hashed(each.passage)) for each in told],
            borrowed=[ReadPassage(max(0, one.chunk_id), one.score, hashed(one.text)) for one in prompts.peer_passages],
            peer_model=self.models[1],
            fault=fault,
        )


AloneWay = tuple[PreparedRequest, Callable[[], Machine]]
