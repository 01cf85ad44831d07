"""An answer's proof: what its strategy gives at each position, computed again and held against what is recorded.

A token is a function of the seed, its position and the distributions after the tokens before it. So the recorded tokens
are rows that are known, appended to the prompts of every side that took part, and a token that differs is found where
it stands: those behind it are judged for themselves. No drafts, trees or messages take part.

The other side's part is computed here as well where its model is the same and its passages can be had, as a device has
its cloud's. Else both sides write the answer once more, from the recorded tokens on wherever one differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

import msgspec

from paceline.core.aggregation.aggregators import AggregatorName, make_aggregator
from paceline.core.aggregation.weights import side_weights
from paceline.core.batching.segment import Segment
from paceline.engine.reader.question import separate_questions
from paceline.errors import LinkError, PacelineError
from paceline.rag.prompt import query_of
from paceline.rag.records import Passage
from paceline.runtime.admission import AnswerPlaces
from paceline.runtime.engine_loop.requests import SequenceOp
from paceline.runtime.peers import Peers
from paceline.runtime.preparation import Preparation
from paceline.runtime.reading import Reading
from paceline.runtime.resources import Resources
from paceline.runtime.service import (
    AnswerProof,
    AnswerRecord,
    Difference,
    GenerateRequest,
    GenerationResult,
    ReadPassage,
)
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.output_text import MAX_ROWS, PART_BYTES, AnswerText, Written
from paceline.runtime.sessions.prepared import PreparedRequest, hashed, model_id
from paceline.runtime.sessions.prompts import PromptSet, prompts_of, query_with_text
from paceline.runtime.sessions.remote import search_cloud
from paceline.runtime.units import Turnstile
from paceline.strategies.base import SIDES, Branch, OutputRules, Side, other
from paceline.strategies.decoding.branch_decoder import log_h_of
from paceline.strategies.proof import Share, TargetRule, tokens_owed
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions, Options, stretch_of
from paceline.wire.verify_messages import VerifyOptions

MAX_AGAIN: Final = 8  # times that both sides are asked for one answer: once, and once more behind each that differs


class NotProvableError(PacelineError):
    """Why the rest of an answer is not computed again, as a sentence."""


@dataclass(frozen=True, slots=True)
class Again:
    """What an answer was written from, found again."""

    request: GenerateRequest
    record: AnswerRecord
    options: Options
    prompts: PromptSet  # of this side, with the weights that they had
    rules: OutputRules
    text: Sequence[int]  # its tokens, with those of earlier stretches

    @property
    def last(self) -> int:
        """The position after the last one that is judged."""
        return len(self.text) + self.record.ends


class Prover:
    """Belongs to the event loop of its node. One answer is computed at a time, of owners in turn."""

    def __init__(
        self, resources: Resources, peers: Peers, preparation: Preparation, reading: Reading, places: AnswerPlaces
    ) -> None:
        self._resources, self._peers, self._places = resources, peers, places
        self._preparation, self._reading = preparation, reading
        self._turns = Turnstile(1)

    async def prove(self, request: GenerateRequest, records: Sequence[AnswerRecord]) -> AnswerProof:
        """See `Service`."""
        owner, proof, text = request.account.owner, AnswerProof(), list[int]()
        ends = {*self._resources.tokenizer.eos_ids, *request.output.stop_token_ids}
        name = self._resources.tokenizer.token_name
        self._resources.guard.refuse_spent()
        self._places.take(owner)
        try:
            async with self._turns.turn(owner):
                for record in records:
                    text, before, at = [*text[: record.start], *record.tokens], proof.tokens, record.start
                    proof.tokens += len(record.tokens) + record.ends
                    try:
                        async with aclosing(self._owed(request, record, text, proof)) as tokens:
                            async for owed in tokens:
                                said = text[at] if at < len(text) else None
                                if owed not in ends if said is None else owed != said:
                                    names = "" if said is None else name(said), name(owed)
                                    index = before + at - record.start
                                    proof.differing.append(Difference(index, said, owed, names))
                                at += 1
                    except PacelineError as error:
                        left = proof.tokens - before - (at - record.start)
                        proof.unproven[str(error)] = proof.unproven.get(str(error), 0) + left
        finally:
            self._places.give_back(owner)
        return proof

    async def _owed(
        self, request: GenerateRequest, record: AnswerRecord, text: Sequence[int], proof: AnswerProof
    ) -> AsyncGenerator[int, None]:
        """The token owed at each position, in order. Raises PacelineError where the rest cannot be told."""
        again, side = await self._found(request, record, text), self._resources.side
        text_of: Mapping[str, tuple[Side, ...]] = {"front": (side,), "cloud": ("cloud",), "both": SIDES}
        writers = counting = text_of[STRATEGIES[record.strategy].text_of]
        branches: dict[Side, Sequence[Branch]] = {side: again.prompts.branches}
        if (
            writers != (side,)
            and (passages := await self._passages(again.request, record, text, record.others)) is not None
        ):
            branches[other(side)] = await self._peer_branches(again, passages)
        log_h = {each: log_h_of(branches.get(each, ())) for each in SIDES}
        aggregator = None
        if isinstance(options := again.options, AggregateOptions):
            if options.writer is not None and all(each is None for each in log_h.values()):
                log_h[options.writer] = 0.0
            name = cast(AggregatorName, options.aggregator or "mixture")
            sampling, size = again.rules.sampling, again.rules.vocab_size
            aggregator = make_aggregator(name, sampling, needs_dists=options.needs_dists, vocab_size=size)
            counting = tuple(each for each, weight in side_weights(log_h).items() if weight > 0.0)
        known = all(each in branches for each in writers)
        if known and (counting == (side,) or record.peer_model == self._resources.info.fingerprint):
            rule = TargetRule(again.rules, aggregator, log_h)
            steps = self._computed(again, rule, {each: branches[each] for each in counting})
        else:
            steps = self._asked(again, proof)
        async with aclosing(steps) as tokens:
            async for token in tokens:
                yield token

    # ---- what it was written from -----------------------------------------------------------------------------------
    async def _found(self, request: GenerateRequest, record: AnswerRecord, text: Sequence[int]) -> Again:
        """Raises PacelineError for what is not there any more."""
        resources, strategy = self._resources, STRATEGIES.get(record.strategy)
        guard = resources.guard
        if record.fault:
            raise NotProvableError(record.fault)
        if strategy is None or record.side != resources.side or record.model != model_id(resources.info):
            raise NotProvableError("It was written by another model than the one that is served here now.")
        if guard.policy:
            await asyncio.to_thread(guard.decide, request, resources.info.name)  # may this key ask this model
            if record.passages or record.others or record.borrowed or strategy.needs_peer:
                raise NotProvableError("The owner's rules hold for what it has read: a proof does not read it again.")
        if resources.worker.told or resources.worker.doubt:
            raise NotProvableError(f"This side's model is approximate: {resources.worker.doubt}.")
        try:
            options = msgspec.json.decode(record.options, type=strategy.options)
        except msgspec.ValidationError:
            raise NotProvableError("It was written by another version.") from None
        drawn = isinstance(options, VerifyOptions) and options.verifier != "agreement"
        if drawn and record.sampling.temperature > 0.0:
            raise NotProvableError("Its verifier has drawn tokens by chances of its own.")
        kept = await asyncio.to_thread(resources.chunks, record.passages)
        if not all(chunk in kept for chunk in record.passages):
            raise NotProvableError("A document that it has read has been changed or removed since.")
        form, sampling = record.constraint, record.sampling
        mask = None if form is None else await resources.mask(form, request.account.owner)
        rules = resources.rules(sampling, record.limit, mask)
        _, end = stretch_of(record.start, options.stretch, record.limit)
        for messages in conversations(request.prompt.messages, record.messages):
            asked = replace(
                request,
                prompt=replace(request.prompt, messages=messages, shared=None),
                wish=replace(
                    request.wish,
                    strategy=record.strategy,
                    sampling=sampling,
                    options={"reading": options.reading},
                ),
                output=replace(request.output, constraint=form, stop=()),
                sources=replace(request.sources, passages=tuple(kept[chunk] for chunk in record.passages)),
                joining=replace(request.joining, on_loss="fail"),
            )
            borrowed = await self._passages(asked, record, text, record.borrowed)
            if borrowed is None:
                raise NotProvableError("Passages of the cloud that it has read cannot be had now, or are others.")
            prompts = await self._reading.prompts(asked, None, borrowed, length=end if record.start else 0)
            if [hashed(branch.prompt) for branch in prompts.branches] == [prompt for prompt, _ in record.prompts]:
                weighed = zip(prompts.branches, record.prompts, strict=True)
                branches = tuple(Branch(branch.prompt, score) for branch, (_, score) in weighed)
                return Again(asked, record, options, replace(prompts, branches=branches), rules, text)
        raise NotProvableError("The conversation, or a document that it has read, is not what it was.")

    async def _passages(
        self, asked: GenerateRequest, record: AnswerRecord, text: Sequence[int], read: Sequence[ReadPassage]
    ) -> Sequence[Passage] | None:
        """Passages of the other side; None where they cannot be had here. A cloud finds its own again by the query that
        it was sent for the answer."""
        _, link = self._peers.peer_for(asked)
        if not read:
            return ()
        if self._resources.side == "cloud" or link is None or not all(each.chunk for each in read):
            return None
        messages, tokenizer = asked.prompt.messages, self._resources.tokenizer
        query = query_with_text(messages, text[: record.start], tokenizer) if record.start else query_of(messages)
        with suppress(LinkError):
            hits = await search_cloud(link, query, max(asked.wish.documents, len(read)), Egress())
            found = {each.chunk_id: each for each in hits}
            if all(each.chunk in found and hashed(found[each.chunk].text) == each.text for each in read):
                return [replace(found[each.chunk], score=each.score) for each in read]
        return None

    async def _peer_branches(self, again: Again, passages: Sequence[Passage]) -> Sequence[Branch]:
        """As the peer has made them, see `runtime.peers`."""
        resources, record, request = self._resources, again.record, again.request
        every, positions = again.options.stretch, resources.max_positions
        end = stretch_of(record.start, every, record.limit)[1] if every else record.start + 1
        work = partial(
            prompts_of,
            request.prompt.messages,
            None,
            resources.tokenizer,
            k=0,
            max_prompt=positions - max(end, min(record.limit, positions // 2)),
            found=passages,
            temperature=self._peers.scales.temperature,
            template=request.prompt.template,
            reading=resources.reading(again.options.reading),
        )
        prompts = await resources.units.do("search", work, request.account.owner)
        unlike = self._peers.scales.difference(self._peers.peer_for(request)[0])
        return (prompts.with_equal_sides() if unlike else prompts).branches

    # ---- two ways to the tokens that are owed -----------------------------------------------------------------------
    async def _computed(
        self, again: Again, rule: TargetRule, branches: Mapping[Side, Sequence[Branch]]
    ) -> AsyncGenerator[int, None]:
        """At this side alone."""
        resources, worker, text, start = self._resources, self._resources.worker, again.text, again.record.start
        rescoring = again.options.rescoring
        shares = {side: Share(rule.rules, each, text[:start], rescoring=rescoring) for side, each in branches.items()}
        parts = [(worker.allocate(), branch.prompt) for each in branches.values() for branch in each]
        first, end = next(iter(shares.values())).first, max(start, again.last - 1)  # rows, of these tokens
        claim = resources.claim([len(prompt) + end for _, prompt in parts], 1)
        if claim is None:
            raise NotProvableError("There is no memory to compute it again.")
        group = worker.group(claim.rows, owner=again.request.account.owner)
        size = max(1, min(MAX_ROWS, PART_BYTES // (8 * resources.info.vocab_size * len(parts))))
        pieces = [(0, first), *((at, min(at + size, end)) for at in range(first, end, size))]
        try:
            for begin, stop in pieces if again.last > start else ():
                segments = [
                    Segment(seq, len(prompt) + begin, tuple(text[begin:stop]), None, "all")
                    if begin or stop > first
                    else Segment(seq, 0, (*prompt, *text[:first]), None, "last")
                    for seq, prompt in parts
                ]
                computing = [asyncio.ensure_future(worker.compute(segment, group)) for segment in segments]
                try:
                    rows = await asyncio.gather(*computing)
                finally:  # of sequences that are released no forward is answered
                    for each in computing:
                        each.cancel()
                position = stop + 1 - len(rows[0])
                for token in await asyncio.to_thread(tokens_owed, rule, shares, text, position, rows, start):
                    yield token
        finally:
            for seq, _ in parts:
                worker.submit(SequenceOp.release(seq))

    async def _asked(self, again: Again, proof: AnswerProof) -> AsyncGenerator[int, None]:
        """By both sides, once more. They go on from the recorded tokens where one differs."""
        resources, record, text, at = self._resources, again.record, again.text, again.record.start
        name, link = self._peers.peer_for(again.request)
        if link is None or link.peer.model != record.peer_model:
            raise NotProvableError("The other side, which took part, is not linked, or has another model now.")
        for _ in range(MAX_AGAIN):
            share = resources.claim([len(branch.prompt) + at for branch in again.prompts.branches], again.last - at)
            if share is None:
                raise NotProvableError("There is no memory to write it once more.")
            prepared = PreparedRequest(
                again.request,
                resources.side,
                record.strategy,
                "",
                again.options,
                again.prompts,
                max_new_tokens=resources.max_positions - again.prompts.longest,
                limit=record.limit,
                end=again.last,
                missing=None,
                peer_name=name,
                mask=again.rules.mask,
                claim=share.rows,
            )
            written = Written(AnswerText(resources.tokenizer, ()), tokens=list(text[:at]))
            events = [event async for event in (await self._preparation.again(prepared, written)).run()]
            assert isinstance(events[-1], GenerationResult)
            (told,) = events[-1].records
            if told.fault or told.others != record.others:
                raise NotProvableError(told.fault or "The other side has read other passages than then.")
            for token in (*told.tokens, *([min(again.rules.eos_ids)] if told.ends else [])):
                proof.asked += 1
                yield token
                at += 1
                if at > len(text) or token != text[at - 1]:
                    break
            if at >= again.last:
                return
        raise NotProvableError(f"After {MAX_AGAIN} tokens that differ both sides were not asked any more.")


def conversations(messages: Sequence[Mapping[str, str]], count: int) -> Iterator[tuple[Mapping[str, str], ...]]:
    """What may have been answered: so many messages, of which the last may have been asked in parts."""
    dropped = len(messages) - count
    for fixed in (0, 1) if dropped > 0 else (0,):
        kept = (*messages[:fixed], *messages[fixed + dropped :])
        yield kept
        for part in separate_questions(kept[-1]["content"]) if kept else ():
            yield (*kept[:-1], {**kept[-1], "content": part})
