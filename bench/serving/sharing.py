"""Savings of the prefix cache: a conversation's eighth turn, and a long document that several clients ask about.

Only Paceline. Each comparison asks the same question with a key that has asked before and with one that has not: the
cache is not shared between keys. Answers are greedy and sent back with the next turn as they were received.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import httpx

from paceline.commands.demo import Children

from ..bootstrap import median_of, ratio_of
from ..findings import Findings
from ..report import Claim
from .clients import Answer, Question, ask, ask_together, connect, user
from .model_files import ModelFiles
from .systems import Paceline, start

STRATEGY: Final = {"paceline": {"strategy": "autoregressive"}}


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of the measurement, in tokens where nothing else is said."""

    conversations: int = 10
    turns: int = 8
    question: int = 48
    answer: int = 64
    document: int = 1024
    readers: int = 8  # clients that ask about the document at once
    document_question: int = 16
    document_answer: int = 4
    document_rounds: int = 3


def measure(children: Children, model: ModelFiles, load: Load) -> Findings:
    """Start a server, and leave it running until `children` ends."""
    fresh = [f"stranger-{i}" for i in range(load.conversations)]  # each has asked nothing before its one question
    paceline = Paceline(keys=("friend", "documents", *fresh))
    url = start(children, paceline, model).url
    return asyncio.run(_measure(url, paceline.dialect(model, temperature=0.0, top_p=1.0, seed=0), model, load, fresh))


async def _measure(
    url: str, dialect: Mapping[str, object], model: ModelFiles, load: Load, fresh: Sequence[str]
) -> Findings:
    extra = {**dialect, **STRATEGY}
    async with connect(url, load.readers) as client:
        cached, uncached = await _conversations(client, extra, model, load, fresh)
        rows = [_turn_row("yes", cached, load), _turn_row("no", uncached, load)]
        rows += await _documents(client, extra, model, load)
    ratio = ratio_of([answer.ttft_ms for answer in cached], [answer.ttft_ms for answer in uncached])
    found = Findings(rows)
    found.claim(Claim("serving.multi_turn_ttft", ratio.value, 0.15, "lower"), ratio)
    return found


# ---- conversations --------------------------------------------------------------------------------------------------
async def _conversations(
    client: httpx.AsyncClient, extra: Mapping[str, object], model: ModelFiles, load: Load, fresh: Sequence[str]
) -> tuple[list[Answer], list[Answer]]:
    """The last turn's answers of each conversation, with the earlier turns cached and without.

    All conversations are written turn by turn, so that each is cached while the others are written. The order of the
    two alternates.
    """
    talks: list[list[Mapping[str, str]]] = [[] for _ in fresh]
    for turn in range(load.turns - 1):
        for i, talk in enumerate(talks):
            talk.append(user(model.text(turn * len(talks) + i, load.question)))
            answer = await ask(client, Question(talk, load.answer, extra, "friend"))
            talk.append({"role": "assistant", "content": answer.text})
    pairs: list[dict[bool, Answer]] = []
    for i, (talk, stranger) in enumerate(zip(talks, fresh, strict=True)):
        talk.append(user(model.text(load.turns * len(talks) + i, load.question)))
        question = Question(talk, 2, extra, "friend")
        asked = {True: question, False: replace(question, key=stranger)}
        pairs.append({known: await ask(client, asked[known]) for known in (bool(i % 2), not i % 2)})
    return [pair[True] for pair in pairs], [pair[False] for pair in pairs]


def _turn_row(cached: str, answers: Sequence[Answer], load: Load) -> dict[str, object]:
    ttft = median_of([answer.ttft_ms for answer in answers])
    return {
        "part": "conversation",
        "way": f"turn {load.turns}",
        "cached": cached,
        "ttft_ms": ttft.value,
        "low": ttft.low,
        "high": ttft.high,
        "prompt_tokens": statistics.median(answer.prompt_tokens for answer in answers),
        "cached_tokens": statistics.median(answer.cached_tokens for answer in answers),
    }


# ---- a document in the prompt ---------------------------------------------------------------------------------------
async def _documents(
    client: httpx.AsyncClient, extra: Mapping[str, object], model: ModelFiles, load: Load
) -> list[dict[str, object]]:
    """Rows of readers of one document, who ask all at once, then once more, and of readers of a document each.

    The documents of one round differ in their first word, so that none has a prefix in common with another.
    """
    numbers = itertools.count(model.vocabulary.words.start)
    found: dict[tuple[str, str], list[list[Answer]]] = {}
    for _ in range(load.document_rounds):
        shared = model.text(next(numbers), load.document)
        own = [model.text(next(numbers), load.document) for _ in range(load.readers)]
        for documents, texts in (("one for all", [shared] * load.readers), ("one each", own)):
            for when in ("first", "again"):
                questions = [
                    Question(
                        (user(text + model.text(next(numbers), load.document_question)),),
                        load.document_answer,
                        extra,
                        "documents",
                    )
                    for text in texts
                ]
                found.setdefault((documents, when), []).append(await ask_together(client, questions))
    return [_document_row(documents, when, rounds) for (documents, when), rounds in found.items()]


def _document_row(documents: str, when: str, rounds: Sequence[Sequence[Answer]]) -> dict[str, object]:
    ttft = median_of([statistics.median(answer.ttft_ms for answer in answers) for answers in rounds])
    every = [answer for answers in rounds for answer in answers]
    return {
        "part": "document",
        "way": f"{documents}, asked {'once more' if when == 'again' else 'first'}",
        "clients": len(rounds[0]),
        "ttft_ms": ttft.value,
        "ttft_worst_ms": max(answer.ttft_ms for answer in every),
        "prompt_tokens": statistics.median(answer.prompt_tokens for answer in every),
        "cached_tokens": statistics.mean(answer.cached_tokens for answer in every),
    }
