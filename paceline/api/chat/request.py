"""Conversion of chat bodies to requests of generations: validated, defaults filled in, one seed per choice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.api.chat.schema import ChatRequest, Message, Part
from paceline.api.chat.tools import CLOSE, OPEN, ToolUse, format_instructions, tool_use
from paceline.api.generation.request import (
    check_relations,
    choices_of,
    form_of,
    generation_of,
    size_of_schema,
    unreadable,
)
from paceline.api.generation.schema import switched
from paceline.api.http.auth import Identity
from paceline.api.models import chat_model, named_switch
from paceline.errors import RequestError
from paceline.runtime.service import AskedPrompt, GenerateRequest, Service, SharedPrompt
from paceline.wire.messages import MAX_TEMPLATE

# Conversion of a conversation to the input of a chat template: one role and one text per message.
#
# Parts are joined, and `developer` becomes `system`. Earlier tool calls and their results are written in the text
# format of Hermes and Qwen2.5, in the order of the calls. Images and sound are refused by name: a text model cannot
# read them; files have become text before (`api/generation/attachments.py`). Source of the format: the chat template of
# Qwen2.5.


_ROLES = {"developer": "system", "function": "tool"}  # here, since instructions are appended to the system message


def conversation(
    messages: Sequence[Message], instructions: Sequence[str] = (), system: str = ""
) -> tuple[dict[str, str], ...]:
    """`instructions`: appended to the system message. system: that message where the conversation has none.

    Raises RequestError (400) that names message and part.
    """
    result: list[dict[str, str]] = []
    if _role(messages[0]) != "system" and (own := [text for text in (system, *instructions) if text]):
        result.append({"role": "system", "content": "\n\n".join(own)})
        instructions = ()
    calls: list[str | None] = []  # ids of the last assistant message's calls
    returned: list[tuple[int, str]] = []  # their results: (index among the calls, text)
    for index, message in enumerate(messages):
        role, content = _role(message), _content(message, f"messages[{index}]")
        if role == "tool":
            position = calls.index(message.tool_call_id) if message.tool_call_id in calls else len(calls)
            returned.append((position, content))
            if index + 1 < len(messages) and _role(messages[index + 1]) == "tool":
                continue
            results = sorted(returned, key=lambda one: one[0])  # stable: without ids in the order of the messages
            content = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for _, text in results)
            returned = []
        elif role == "assistant":
            calls = [call.id for call in message.tool_calls]
        elif index == 0 and instructions:
            content = "\n\n".join((content, *instructions)) if content else "\n\n".join(instructions)
        result.append({"role": role, "content": content})
    return tuple(result)


def begun(asked: ChatRequest, messages: tuple[dict[str, str], ...]) -> tuple[dict[str, str], ...]:
    """The conversation with the beginning of the answer as its last message of the assistant, which is what a prompt
    goes on from: what the client has sent as that, or nothing where its last one is whole.

    Raises RequestError (400) where the request asks for another turn to be continued.
    """
    last, wanted, anew = asked.messages[-1], asked.continue_final_message, asked.add_generation_prompt
    can = last.role == "assistant" and not last.tool_calls and last.function_call is None
    if wanted and anew:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    continues = can and not anew if wanted is None else wanted
    if (continues and not can) or (anew is False and not continues):
        raise RequestError(
            "Only an answer of the assistant, without calls, can be continued: it must be the last message.",
            param="add_generation_prompt" if wanted is None else "continue_final_message",
        )
    return messages if continues or last.role != "assistant" else (*messages, {"role": "assistant", "content": ""})


def _role(message: Message) -> str:
    return _ROLES.get(message.role, message.role)


def _content(message: Message, where: str) -> str:
    calls = _calls(message, where) if message.role == "assistant" else []
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal
    if content is None and message.role != "assistant":
        raise RequestError(f"A message of the role {message.role} needs content.", param=f"{where}.content")
    text = content if isinstance(content, str) else ""
    if isinstance(content, list):
        text = "".join(_part(part, message.role, f"{where}.content[{i}]") for i, part in enumerate(content))
    return "\n".join(part for part in (text, *calls) if part)


def _part(part: Part, role: str, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None and role == "assistant":
        return part.refusal
    if part.type in ("text", "refusal"):
        raise RequestError(f"A part of the type {part.type} needs a text.", param=where)
    raise unreadable(part.type, where)


def _calls(message: Message, where: str) -> list[str]:
    texts: list[str] = []
    for index, call in enumerate(message.tool_calls):
        if call.function is not None:
            texts.append(_call_text(call.function.name, _json(call.function.arguments)))
        elif call.custom is not None:
            texts.append(_call_text(call.custom.name, json.dumps(call.custom.input, ensure_ascii=False)))
        else:
            raise RequestError("A call needs a function.", param=f"{where}.tool_calls[{index}].function")
    if message.function_call is not None:
        texts.append(_call_text(message.function_call.name, _json(message.function_call.arguments)))
    return texts


def _call_text(name: str, arguments: str) -> str:
    """A tool call as models trained on this format write it. `arguments`: JSON."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{CLOSE}'


def _json(arguments: str) -> str:
    """Arguments as JSON: unchanged, or as a string if a model wrote invalid JSON."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return json.dumps(arguments, ensure_ascii=False) if arguments else "{}"
    return arguments


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One HTTP call: what was asked, and the requests of its generations."""

    asked: ChatRequest
    tools: ToolUse | None  # None: none may be called
    requests: tuple[GenerateRequest, ...]  # one per choice

    @property
    def report(self) -> bool:
        return self.asked.paceline.report


def chat_call(asked: ChatRequest, service: Service, identity: Identity, *, documents: int) -> ChatCall:
    """Raises RequestError: 400 that names the field, 403 for a device of another key, 404 for an unknown model."""
    model = chat_model(service, asked.model)
    asked = switched(asked, named_switch(service, asked.model))
    check_relations(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    tools = tool_use(asked)
    form = form_of(asked)
    instructions = [text for text in (tools and tools.instructions(), format_instructions(asked, tools)) if text]
    request = generation_of(
        asked,
        model,
        service,
        identity,
        documents=documents,
        limit=limit,
        form=form if tools is None else tools.constraint(form),
    )
    may_be_free = tools is not None and not tools.required and form is None
    request = replace(
        request,
        prompt=AskedPrompt(
            messages=begun(asked, conversation(asked.messages, instructions, model.system)),
            template=_template(asked),
            # In a workflow each choice has agents of its own, who find other passages.
            shared=SharedPrompt() if asked.n > 1 and asked.paceline.workflow is None else None,
        ),
        output=replace(
            request.output,
            top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            default_tokens=None if may_be_free else request.output.default_tokens,
        ),
    )
    return ChatCall(asked, tools, choices_of(request, asked.n))


def _template(asked: ChatRequest) -> Mapping[str, object]:
    """Variables that the request sets in chat templates. Raises RequestError (400)."""
    switch = {} if asked.enable_thinking is None else {"enable_thinking": asked.enable_thinking}
    fields = switch | asked.chat_template_kwargs
    if size_of_schema(fields, "chat_template_kwargs") > MAX_TEMPLATE:
        raise RequestError(f"It takes more than {MAX_TEMPLATE} characters.", param="chat_template_kwargs")
    return fields
