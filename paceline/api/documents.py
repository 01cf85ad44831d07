"""`/v1/documents`: the documents that this side reads for every answer, by name, with a question that each can answer.

The page shows them before anything is asked. They are those that `paceline docs` manages, which any key that may chat
can cite; uploads are listed by `/v1/vector_stores`. Questions are turned round from sentences, by rules and in English:
a document without such a sentence has none, and its topic then says what to ask about. Both are text of a stranger, and
are shown and asked as one line without characters that cannot be seen.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from paceline.api.http.body import Schema
from paceline.api.http.routing import Caller, ServiceDep
from paceline.api.openapi import keyed_router
from paceline.core.printable import one_line

MAX_SHOWN = 200
MAX_TOPIC = 80  # characters
MAX_READ = 2000  # characters of a document's beginning
MAX_SENTENCE = 161  # characters, its point included

_SENTENCE = re.compile(rf"[^.!?\n#|>*`]{{12,{MAX_SENTENCE - 1}}}[.](?=\s|$)")
_SUBJECT = r"(?P<subject>(?:The|Our|My|A|An) [^,;:()]{3,70}?)"
_WHEN = re.compile(rf"{_SUBJECT} (?P<verb>open|close|start|begin|leave|depart|arrive|meet)s (?:at|on|every|from) .+")
_COSTS = re.compile(rf"{_SUBJECT} costs? .+")
_BY = re.compile(rf"{_SUBJECT} (?P<be>is|was) (?P<verb>\w+) by .+")
_AS = re.compile(rf"{_SUBJECT} (?P<verb>work|serve)s as .+")
_WHO = re.compile(
    rf"{_SUBJECT} (?P<be>is|was) (?:(?:Mr|Mrs|Ms|Dr|Captain|Professor) )?[A-Z][\w'-]+(?: [A-Z][\w'-]+){{0,2}}"
)
_PERSON = re.compile(
    r"\b(?:captain|chair|director|doctor|head|landlord|manager|mayor|neighbour|owner|teacher|tenant)\b"
)
_WHAT = re.compile(rf"{_SUBJECT} (?P<be>is|was) (?!not |a |an |the most |\w+ed |\w+ing )[^,;]{{2,60}}")
_OPENING = re.compile(r"(?:The|Our|My|A|An)(?= )")


def question_of(sentences: Iterable[str]) -> str | None:
    """A question that one of these sentences answers: the first for which there is a rule."""
    for sentence in sentences:
        for rule, made in (
            (_WHEN, "When does {subject} {verb}?"),
            (_COSTS, "How much does {subject} cost?"),
            (_BY, "Who {be} {subject} {verb} by?"),
            (_AS, "What does {subject} {verb} as?"),
            (_WHO, "Who {be} {subject}?"),
            (_WHAT, "What {be} {subject}?"),
        ):
            found = rule.fullmatch(sentence.strip().removesuffix("."))
            if found is not None:
                parts = found.groupdict()
                if rule is _WHO and _PERSON.search(parts["subject"]) is None:
                    continue
                subject = _OPENING.sub(lambda word: word[0].lower(), parts.pop("subject"), count=1)
                return made.format(subject=subject, **parts)
    return None


class ShownDocument(BaseModel):
    """One document, without its text."""

    name: str
    passages: int  # into which its text is divided
    topic: str  # its title or first heading, else its name
    question: str | None  # that it can answer


class DocumentsBody(BaseModel):
    """The answer. `total` may exceed the number of documents shown."""

    object: str = "list"
    side: str
    total: int
    data: list[ShownDocument]


class DocumentsQuery(Schema):
    """Query of the list. Not strict about types: a query string has none."""

    model_config = ConfigDict(strict=False)

    limit: Annotated[int, Field(ge=1, le=MAX_SHOWN)] = MAX_SHOWN


router = keyed_router("chat", "chat")


@router.get("/v1/documents")
async def list_documents(
    query: Annotated[DocumentsQuery, Query()], service: ServiceDep, caller: Caller
) -> DocumentsBody:
    """List the documents that this side reads for every answer, with a question for each."""
    library = service.library
    if library is None:
        return DocumentsBody(side=service.side, total=0, data=[])
    total, begun = await asyncio.to_thread(library.beginnings, caller.key, query.limit)
    shown = [
        ShownDocument(
            name=document.name,
            passages=document.num_chunks,
            topic=_topic(document.name, title, text),
            question=question_of(one_line(each, MAX_SENTENCE) for each in _SENTENCE.findall(text[:MAX_READ])),
        )
        for document, title, text in begun
    ]
    return DocumentsBody(side=service.side, total=total, data=shown)


def _topic(name: str, title: str, text: str) -> str:
    heading = re.search(r"^#{1,3} (.+)$", text, re.MULTILINE)
    return one_line(title or (heading[1] if heading else ""), MAX_TOPIC) or name
