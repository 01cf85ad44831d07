"""`/v1/documents`: the documents that this side reads for every answer, by name, with a question that each can answer;
`/v1/passages/{id}`: a cited passage in its document, for whoever could have read it in an answer; and `/v1/policy`:
what the owner's rules make of a question, and the confirmation of a document that they ask for.

The page shows the documents before anything is asked. They are those that `paceline docs` manages, which any key that
may chat can cite; uploads are listed by `/v1/vector_stores`. Questions are turned round from sentences, by rules and in
English: a document without such a sentence has none, and its topic then says what to ask about. Both are text of a
stranger, and are shown and asked as one line without characters that cannot be seen. The page `/passage?id=…`, to which
citations link, shows passages: of these documents to every key that may chat, of a vector store to its owner.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Annotated

from fastapi import Path, Query, Request
from pydantic import BaseModel, Field

from paceline.api.chat.request import ChatRequest, chat_call
from paceline.api.generation.schema import Extension
from paceline.api.http.body import QuerySchema, Schema, while_connected
from paceline.api.http.routing import Caller, ServiceDep, SettingsDep
from paceline.api.models import chat_model
from paceline.api.openapi import keyed_router
from paceline.api.search import LibraryDep, select_stores
from paceline.core.printable import one_line
from paceline.errors import RequestError

MAX_SHOWN = 200
MAX_TOPIC = 80  # characters
MAX_READ = 2000  # characters of a document's beginning
MAX_SENTENCE = 161  # characters, its point included

_MAX_DIGITS = 18  # of a passage's id

_SENTENCE = re.compile(rf"[^.!?\n#|>*`]{{12,{MAX_SENTENCE - 1}}}[.](?=\s|$)")
_HEADING = re.compile(r"^#{1,3} (.+)$", re.MULTILINE)
_SUBJECT = r"(?P<subject>(?:The|Our|My|A|An) [^,;:()]{3,70}?)"
_WHO = "Who {be} {subject}?"
_RULES = [
    (re.compile(_SUBJECT + pattern), question)
    for pattern, question in (
        (
            r" (?P<verb>open|close|start|begin|leave|depart|arrive|meet)s (?:at|on|every|from) .+",
            "When does {subject} {verb}?",
        ),
        (r" costs? .+", "How much does {subject} cost?"),
        (r" (?P<be>is|was) (?P<verb>\w+) by .+", "Who {be} {subject} {verb} by?"),
        (r" (?P<verb>work|serve)s as .+", "What does {subject} {verb} as?"),
        (
            r" (?P<be>is|was) (?:(?:Mr|Mrs|Ms|Dr|Captain|Professor) )?[A-Z][\w'-]+(?: [A-Z][\w'-]+){0,2}",
            _WHO,
        ),
        (r" (?P<be>is|was) (?!not |a |an |the most |\w+ed |\w+ing )[^,;]{2,60}", "What {be} {subject}?"),
    )
]
_PERSON = re.compile(
    r"\b(?:captain|chair|director|doctor|head|landlord|manager|mayor|neighbour|owner|teacher|tenant)\b"
)
_OPENING = re.compile(r"(?:The|Our|My|A|An)(?= )")


def question_of(sentences: Iterable[str]) -> str | None:
    """A question that one of these sentences answers: the first for which there is a rule."""
    for sentence in sentences:
        for rule, question in _RULES:
            found = rule.fullmatch(sentence.strip().removesuffix("."))
            if found is not None and (question != _WHO or _PERSON.search(found["subject"])):
                subject = _OPENING.sub(lambda word: word[0].lower(), found["subject"], count=1)
                return question.format(**found.groupdict() | {"subject": subject})
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


class DocumentsQuery(QuerySchema):
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
    heading = _HEADING.search(text)
    return one_line(title or (heading[1] if heading else ""), MAX_TOPIC) or name


class PassageBody(BaseModel):
    """The answer."""

    id: int
    object: str
    document: str
    place: str  # page, heading or lines; empty where it is not known
    text: str
    before: list[str]  # what stands before it in the document, in parts; parts overlap a little
    after: list[str]
    side: str


@router.get("/v1/passages/{id}")
async def show_passage(
    number: Annotated[str, Path(alias="id")], library: LibraryDep, service: ServiceDep, caller: Caller
) -> PassageBody:
    """Show a cited passage in its document."""
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
        raise RequestError("The id of a passage is a number.", param="id")
    passage, before, after = await asyncio.to_thread(library.passage, caller.key, int(number))
    return PassageBody(
        id=passage.chunk_id,
        object="paceline.passage",
        document=passage.document,
        place=passage.place,
        text=passage.text.strip(),
        before=list(before),
        after=list(after),
        side=service.side,
    )


# ---- the owner's rules: `/v1/policy` ---------------------------------------------------------------------------------
# A check sends nothing to the other side. Documents are confirmed over HTTP by keys alone that the policy names for it;
# without keys, any program of the machine could, so there it is done at a terminal.
MAX_QUESTION = 65_536  # characters


class CheckRequest(Schema):
    question: Annotated[str, Field(min_length=1, max_length=MAX_QUESTION)]
    model: str = ""
    key: Annotated[str, Field(max_length=64)] | None = None  # name of another key, for an owner
    paceline: Extension = Field(default_factory=Extension)


class FoundDocument(BaseModel):
    document: str
    rules: list[str]


class Waiting(BaseModel):
    """A document that would be read, were it confirmed."""

    id: str
    document: str


class CheckAnswer(BaseModel):
    """The level and the documents that an answer would have. `rule`: the one that decided the level; empty: none did,
    and what was asked for holds."""

    level: str
    rule: str
    strategy: str
    why: str
    leaves: str
    documents: list[FoundDocument]
    confirmation_needed: list[Waiting]
    budgets_left: dict[str, float]


class Confirmation(Schema):
    document: Annotated[str, Field(max_length=64)]  # id, as an answer's report has it


class Confirmed(BaseModel):
    document: str  # its name


policy = keyed_router("policy", "chat", prefix="/v1/policy")


@policy.post("/check")
async def check_policy(
    asked: CheckRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> CheckAnswer:
    """Say what would happen to a question, and why."""
    model = chat_model(service, asked.model or service.models()[0].name).name
    message = {"role": "user", "content": asked.question}
    chat = ChatRequest.model_validate({"model": model, "messages": [message]})
    call = chat_call(
        chat.model_copy(update={"paceline": asked.paceline}), service, caller, documents=settings.documents
    )
    requests = call.requests
    if asked.paceline.vector_stores is not None:
        requests, _ = await select_stores(requests, service, caller, asked.paceline.vector_stores)
    async with service.of(model) as served:
        found = await while_connected(request.receive, served.explain(requests[0], asked.key))
    return CheckAnswer(
        level=found.decision.level,
        rule=found.decision.rule,
        strategy=found.strategy,
        why=found.why,
        leaves=found.leaves,
        documents=[FoundDocument(document=name, rules=list(rules)) for name, rules in found.documents],
        confirmation_needed=[Waiting(id=key, document=name) for key, name in found.decision.asks],
        budgets_left={name: left for name, left in found.left.items()},
    )


@policy.post("/confirmations")
async def confirm_document(asked: Confirmation, service: ServiceDep, caller: Caller) -> Confirmed:
    """Confirm a document that is to be asked for: from now on answers read it."""
    return Confirmed(document=await service.confirm(caller.key, asked.document))
