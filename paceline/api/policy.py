"""`/v1/policy`: what the owner's policy makes of a question, and the confirmation of a document that it asks for.

A check sends nothing to the other side. Documents are confirmed over HTTP by keys alone that the
policy names for it; without keys, any program of the machine could, so there it is done at a terminal.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, Field

from paceline.api.chat.request import ChatRequest, chat_call
from paceline.api.generation.schema import Extension
from paceline.api.http.body import Schema, while_connected
from paceline.api.http.routing import Caller, ServiceDep, SettingsDep
from paceline.api.models import chat_model
from paceline.api.openapi import keyed_router
from paceline.api.vector_stores.search import select_stores

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
    """What would happen. `rule`: which one decided the level; empty: what was asked for holds."""

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


router = keyed_router("policy", "chat", prefix="/v1/policy")


@router.post("/check")
async def check_policy(
    asked: CheckRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> CheckAnswer:
    """Say what would happen to a question, and why."""
    model = asked.model or service.models()[0].name
    chat_model(service, model)
    message = {"role": "user", "content": asked.question}
    chat = ChatRequest.model_validate({"model": model, "messages": [message]})
    call = chat_call(
        chat.model_copy(update={"paceline": asked.paceline}), service, caller, documents=settings.documents
    )
    requests = call.requests
    if asked.paceline.vector_stores is not None:
        requests, _ = await select_stores(requests, service, caller, asked.paceline.vector_stores)
    found = await while_connected(request.receive, service.explain(requests[0], asked.key))
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


@router.post("/confirmations")
async def confirm_document(asked: Confirmation, service: ServiceDep, caller: Caller) -> Confirmed:
    """Confirm a document that is to be asked for: from now on answers read it."""
    return Confirmed(document=await service.confirm(caller.key, asked.document))
