"""Conversion of chat bodies to requests of generations: validated, defaults filled in, one seed per choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.api.chat.messages import begun, conversation
from paceline.api.chat.schema import ChatRequest
from paceline.api.chat.tools import ToolUse, format_instructions, tool_use
from paceline.api.generation.request import check_relations, choices_of, form_of, generation_of, size_of_schema
from paceline.api.generation.switches import switched
from paceline.api.generation.unsupported import refuse_forms, refuse_unsupported
from paceline.api.http.auth import Identity
from paceline.api.http.validation import parse
from paceline.api.models import chat_model, named_switch
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest, Service, SharedPrompt
from paceline.wire.messages import MAX_TEMPLATE


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One HTTP call: the requests of its generations, and the form of its answer."""

    model: str  # name as in the request, and echoed
    stream: bool
    include_usage: bool
    running_usage: bool  # every event has the usage so far
    report: bool
    vector_stores: tuple[str, ...] | None  # read instead of this side's own collection
    tools: ToolUse | None  # None: none may be called
    service_tier: bool  # whether one was requested
    requests: tuple[GenerateRequest, ...]  # one per choice


def chat_call(body: Mapping[str, object], service: Service, identity: Identity, *, documents: int) -> ChatCall:
    """Raises RequestError: 400 that names the field, 403 for a device of another key, 404 for an unknown model."""
    asked = parse_chat(body)
    model = chat_model(service, asked.model)
    asked = switched(asked, named_switch(service, asked.model))
    check_relations(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    tools = tool_use(asked)
    form = form_of(asked)
    instructions = [text for text in (tools and tools.instructions(), format_instructions(asked, tools)) if text]
    request = replace(
        generation_of(
            asked,
            model,
            service,
            identity,
            documents=documents,
            limit=limit,
            form=form if tools is None else tools.constraint(form),
        ),
        messages=begun(asked, conversation(asked.messages, instructions, model.system)),
        top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        template=_template(asked),
        # In a workflow each choice has agents of its own, who find other passages.
        shared=SharedPrompt() if asked.n > 1 and asked.paceline.workflow is None else None,
    )
    if tools is not None and not tools.required and form is None:
        request = replace(request, default_tokens=None)  # it may be free text
    return ChatCall(
        model=asked.model,
        stream=asked.stream,
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        running_usage=asked.stream_options is not None and asked.stream_options.is_running,
        report=asked.paceline.report,
        vector_stores=None if asked.paceline.vector_stores is None else tuple(asked.paceline.vector_stores),
        tools=tools,
        service_tier=asked.service_tier is not None,
        requests=choices_of(request, asked.n),
    )


def _template(asked: ChatRequest) -> Mapping[str, object]:
    """Variables that the request sets in chat templates. Raises RequestError (400)."""
    switch = {} if asked.enable_thinking is None else {"enable_thinking": asked.enable_thinking}
    fields = switch | asked.chat_template_kwargs
    if size_of_schema(fields, "chat_template_kwargs") > MAX_TEMPLATE:
        raise RequestError(f"It takes more than {MAX_TEMPLATE} characters.", param="chat_template_kwargs")
    return fields


def parse_chat(body: Mapping[str, object]) -> ChatRequest:
    refuse_unsupported(body)
    refuse_forms(body)
    return parse(ChatRequest, body)
