"""Questions in a message: the parts that are answered in turn, and whether documents answer them.

Of the second the reader says what small models cannot: given passages, they take an answer out of them, right or wrong,
where a larger model can say that there is none. The reader has learnt to tell (a question and a passage, 30 to 80 ms of
a core). Where it finds an answer in none of a side's passages, the side is one that has found nothing; where that holds
for both, the answer says so.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from paceline.core.sampling.sampler import Constraint
from paceline.engine.base import ModelInfo, TextModel
from paceline.engine.families import NO_THINKING
from paceline.engine.reader.pointer import Pointer
from paceline.engine.reader.question import is_foreign, only_asks, separate_questions
from paceline.errors import ConfigError
from paceline.rag.prompt import Messages
from paceline.rag.records import Passage
from paceline.runtime.service import AUTO, GenerateRequest
from paceline.strategies.base import RoutingContext

log = logging.getLogger("paceline.node")

BETWEEN: Final = "\n"  # parts of an answer
SMALL: Final = 2_000_000_000  # weights of models whose passages are judged: it errs more often than a larger one does
LEAST: Final = 0.1  # probability that a passage answers, of the best one; chosen on questions, bench/LOG.md
MAX_SYSTEM: Final = 600  # characters of a system message that is no more than a manner: a longer one may hold anything
MAX_JUDGED: Final = 32_000  # characters of all passages, some 2 s of a core
UNANSWERED: Final = "The documents do not say."
GENERALLY: Final = " In general: "
_APART: Final = (
    "search_every",
    "joules_per_token",
    "joules_per_step",
)  # options of answers that no other way takes over
_OWN: Final = re.compile(r"\b(?:(?i:my|mine|our|ours|i|we|me)|us)\b")  # not the US
# What is explained or told, seldom in a few words that the reader could point to: it would miss most answers.
_TOLD: Final = re.compile(
    r"\b(?:why|about|differ\w*|compare\w*"
    r"|how\s+(?:to|come|do|does|did|is|are|was|were|can|could|should|would|will|has|have)"
    r"|what\s+(?:are|were|do|does|did|can|could|should|would|will|has|have|happen\w*)"
    r"|what(?:'s|\s+(?:is|was))(?!\s+(?:(?:the|my|our)\b|\S+'s\b)))\b",
    re.IGNORECASE,
)


def parts_asked(
    request: GenerateRequest, context: RoutingContext, tokenizer: TextModel, max_tokens: int | None
) -> Sequence[GenerateRequest]:
    """The request, or one for each part of its question, where documents are read and the text is free of form; each
    says whether its passages are judged. max_tokens: of an answer whose request sets none."""
    options = request.wish.options
    searched = (
        request.wish.documents and request.sources.passages is None and context.own.documents + context.peer.documents
    )
    # One of one document may take the question apart itself.
    if not (searched and _is_free(request, tokenizer)) or tokenizer.one_document:
        return [request]
    judged = options.get("unanswered") != "write" and not any(map(options.get, _APART))
    request = replace(request, wish=replace(request.wish, options={**options, "judged": judged}))
    return separated(request, tokenizer, max_tokens) or [request]


def _is_free(request: GenerateRequest, tokenizer: TextModel) -> bool:
    """Its text is free of form and written as this side chooses, and no model thinks before each part."""
    prompt, output = request.prompt, request.output
    free = output.constraint is None and not request.wish.logprobs and prompt.template in ({}, NO_THINKING)
    thinks = tokenizer.thinking is not None and prompt.template != NO_THINKING
    asks = bool(prompt.messages) and prompt.messages[-1].get("role") == "user"
    return free and asks and not thinks and request.wish.strategy == AUTO


def separated(
    request: GenerateRequest, tokenizer: TextModel, max_tokens: int | None = None
) -> Sequence[GenerateRequest]:
    """A request for each part of its question; none where the answer is in one part. max_tokens: see `parts_asked`."""
    prompt, output = request.prompt, request.output
    waits = request.joining.on_loss == "pause"  # no part can begin, and so wait, without the peer
    if waits or any(BETWEEN in stop for stop in output.stop) or not _is_free(request, tokenizer):
        return []
    last, limit = prompt.messages[-1], output.max_tokens or max_tokens or output.default_tokens  # of all of them
    return [
        replace(
            request,
            output=replace(output, max_tokens=limit),
            prompt=replace(prompt, messages=(*prompt.messages[:-1], {**last, "content": part}), shared=None),
            wish=request.wish.nth(index),
        )
        for index, part in enumerate(separate_questions(last["content"]))
    ]


def unanswered_form(question: str) -> Constraint:
    """How an answer begins that no document holds. What one asks of oneself nobody knows in general: there it ends."""
    rest = "" if _OWN.search(question) else f"{GENERALLY}(.|\\n)+"
    return Constraint("regex", re.escape(UNANSWERED).replace("\\ ", " ") + rest)


def is_judged(model: ModelInfo, tokenizer: TextModel) -> bool:
    """What this model is to read is judged: it is known to be small, and does not judge itself, as a reader does."""
    return not tokenizer.one_document and 0 < model.num_weights <= SMALL


class Judge:
    """Functions of question and passages alone, for any thread. The weights are read when the first one is asked."""

    def __init__(self, load: Callable[[], Pointer]) -> None:
        """load: raises ConfigError where there is no reader here: then every passage is taken for an answer."""
        self._load = load
        self._lock = threading.Lock()
        self._loaded: Pointer | None = None
        self._missing = False

    def question(self, messages: Messages) -> str:
        """The question of a conversation that is nothing else; empty for any other, as one that has gone on."""
        *before, last = messages
        text, told = str(last.get("content", "")), [str(message.get("content", "")) for message in before]
        is_first = all(message.get("role") == "system" for message in before) and len("".join(told)) <= MAX_SYSTEM
        if last.get("role") != "user" or not is_first or not only_asks(text) or is_foreign(text) or _TOLD.search(text):
            return ""
        return "" if any(each and self._answers(text, each) for each in told) else text

    def finds(self, question: str, passages: Sequence[Passage]) -> bool:
        """One of the passages answers the question, or may, as one in another language, which the reader does not read,
        and as those of a long text, which would take it long."""
        texts = [passage.titled for passage in passages]
        long = sum(map(len, texts)) > MAX_JUDGED
        return long or any(is_foreign(text) or self._answers(question, text) for text in texts)

    def _answers(self, question: str, text: str) -> bool:
        pointer = self._pointer()
        return pointer is None or pointer.read(question, text).answered >= LEAST

    def _pointer(self) -> Pointer | None:
        with self._lock:
            if self._loaded is None and not self._missing:
                try:
                    self._loaded = self._load()
                except ConfigError as error:
                    self._missing = True
                    log.warning("whether documents answer a question is not judged here: %s", error)
            return self._loaded
