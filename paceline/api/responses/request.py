"""Conversion of a request to `/v1/responses` to a chat body, and to the initial state of its response. Pure.

A response is generated as a chat completion: `chat.request.chat_call` checks and fills in the common fields. Its errors
are translated back to the field names of `/v1/responses`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from paceline.api.chat.request import MAX_MESSAGES, Part, Role
from paceline.api.generation.schema import (
    MAX_SEARCHED,
    MAX_TOOLS,
    Extension,
    FormFields,
    Hint,
    JsonObject,
    Metadata,
    Probability,
    Stops,
    StoreId,
    Temperature,
    required,
    unreadable,
)
from paceline.api.http.body import Json, QuerySchema, Schema
from paceline.api.search import MAX_RESULTS, FilterField, RankingOptions
from paceline.core.sampling.sampler import SamplingParams
from paceline.errors import RequestError
from paceline.runtime.service import AnswerProof

# ---- bodies, with OpenAI's names and ranges -------------------------------------------------------------------------
# Tools of an unknown type are skipped, since clients send the tools of other hosts too; input items of an unknown type
# are refused by name, since the answer would lack their content. Source: openai-openapi 2.3.0, CreateResponse.
MAX_ID = 512  # characters

Include = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    # Accepted without effect: answers here never hold these.
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class InputItem(Schema):
    """One item of the input. Which fields are required depends on its type."""

    type: str = "message"
    id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    status: str | None = None
    role: Role | None = None
    content: str | list[Part] | None = None
    call_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool
    output: str | list[Part] | None = None


class ResponseTool(Schema):
    """A tool of the type `function` or `file_search`; other types are skipped."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    vector_store_ids: Annotated[list[StoreId], Field(max_length=MAX_SEARCHED)] | None = None
    max_num_results: Annotated[int, Field(ge=1, le=MAX_RESULTS)] | None = None
    filters: FilterField | None = None
    ranking_options: RankingOptions | None = None


class ToolName(Schema):
    type: str
    name: str | None = None


class ToolChoice(Schema):
    """A choice of the type `function`, `allowed_tools`, or a built-in tool."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolName], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)


class ResponseTextFormat(Schema):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None
    pattern: str | None = None  # of `regex`
    grammar: str | None = None  # of `grammar`


class Text(Schema):
    format: ResponseTextFormat = Field(default_factory=ResponseTextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint, without effect


class ResponseReasoning(Schema):
    effort: Hint | None = None
    summary: Hint | None = None  # without effect: thinking is told in full


class ConversationRef(Schema):
    id: Annotated[str, Field(max_length=MAX_ID)]


class ResponseRequest(FormFields):
    refused: ClassVar = {"prompt": "Prompt templates are not kept here; send instructions and input"}

    model: str
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: Text = Field(default_factory=Text)
    reasoning: ResponseReasoning = Field(default_factory=ResponseReasoning)
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stops = Field(default_factory=list)  # ours, as `continue_final_message`: OpenAI has it in chat only
    continue_final_message: bool = False
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Include] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)
    store: bool = True
    stream: bool = False
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    previous_response_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    conversation: Annotated[str, Field(max_length=MAX_ID)] | ConversationRef | None = None
    user: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    service_tier: Hint | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # ours: OpenAI has it in chat only
    paceline: Extension = Field(default_factory=Extension)

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    @model_validator(mode="after")
    def _without_contradictions(self) -> Self:
        if "input" not in self.model_fields_set and self.previous_response_id is None and self.conversation is None:
            raise required("input")
        if self.conversation is not None and self.previous_response_id is not None:
            raise RequestError("conversation and previous_response_id exclude each other.", param="conversation")
        if self.conversation is not None and not self.store:
            raise RequestError("A conversation keeps what is said in it, so store must be true.", param="store")
        if self.background and not self.store:
            raise RequestError("A response in the background can only be fetched if store is true.", param="background")
        for index, tool in enumerate(self.tools):
            if tool.type == "function" and not tool.name:
                raise required(f"tools[{index}].name")
        if sum(tool.type == "file_search" for tool in self.tools) > 1:
            raise RequestError("There may be one tool of the type file_search.", param="tools")
        text = self.text.format
        if text.type == "json_schema" and (text.name is None or text.schema_ is None):
            raise required(f"text.format.{'name' if text.name is None else 'schema'}")
        return self


class RetrieveQuery(QuerySchema):
    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # the sequence number received last


class DeletedResponse(Schema):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class DifferingToken(Schema):
    """A token that is not the one which the strategy gives after the tokens before it."""

    index: int  # in the answer
    token: int | None  # null: the text ends there
    text: str
    expected: int
    expected_text: str


class Unproven(Schema):
    reason: str
    tokens: int


class Verification(Schema):
    """The answer to a verification. `tokens` counts the end of a text too, where a token decided it."""

    id: str
    object: Literal["response.verification"] = "response.verification"
    tokens: int
    proven: int
    asked_again: int  # of all tokens: judged by what both sides have written once more
    differing: list[DifferingToken]
    not_provable: list[Unproven]


def verification(response: str, proof: AnswerProof) -> Json:
    differing = [
        {"index": one.index, "token": one.token, "text": one.names[0], "expected": one.owed}
        | {"expected_text": one.names[1]}
        for one in proof.differing
    ]
    return {
        "id": response,
        "object": "response.verification",
        "tokens": proof.tokens,
        "proven": proof.proven,
        "asked_again": proof.asked,
        "differing": differing,
        "not_provable": [{"reason": reason, "tokens": tokens} for reason, tokens in proof.unproven.items()],
    }


# ---- input items: checked, stored, and converted to chat messages ---------------------------------------------------
# File searches of an earlier answer are accepted, since clients send back what they received, and dropped: the answer's
# text holds their result. So are reasoning items without content, as of other servers.
_TEXTS = ("input_text", "output_text", "reasoning_text", "text")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def input_items(given: str | Sequence[InputItem], *, field: str = "input") -> list[Json]:
    """The input as it is stored, listed and continued: every item with an id. `field`: of the body.

    Raises RequestError (400).
    """
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"id": new_id("msg"), "type": "message", "status": "completed", "role": "user", "content": content}]
    items = [_item(item, f"{field}[{index}]") for index, item in enumerate(given) if not _is_skipped(item)]
    set_apart(items, ())
    return items


def set_apart(items: Sequence[Json], earlier: Iterable[Json]) -> None:
    """Give new ids to the items that have that of one before them: clients send back what they were given, and pages
    and removals go by ids."""
    seen = {item["id"] for item in earlier}
    for item in items:
        if item["id"] in seen:
            item["id"] = new_id(_PREFIXES[str(item["type"])])
        seen.add(item["id"])


def _is_skipped(item: InputItem) -> bool:
    return item.type == "file_search_call" or (item.type == "reasoning" and not item.content)


def _item(item: InputItem, where: str) -> Json:
    status = item.status if item.status in ("in_progress", "completed", "incomplete") else "completed"
    match item.type:
        case "message":
            _need(item, where, "role", "content")
            answered = item.role == "assistant"
            kind = "output_text" if answered else "input_text"
            content = _parts(item.content or "", kind, f"{where}.content", refusals=answered)
            body: Json = {"type": "message", "role": item.role, "content": content}
        case "reasoning":
            parts = _parts(item.content or "", "reasoning_text", f"{where}.content")
            body = {"type": item.type, "summary": [], "content": parts}
        case "function_call":
            _need(item, where, "call_id", "name", "arguments")
            body = {"type": item.type, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case "custom_tool_call":  # of an earlier turn, at another server: its input is a text
            _need(item, where, "call_id", "name", "input")
            arguments = json.dumps({"input": item.input}, ensure_ascii=False)
            body = {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": arguments}
        case "function_call_output" | "custom_tool_call_output":
            _need(item, where, "call_id", "output")
            output = item.output or ""
            text = output if isinstance(output, str) else _joined(_parts(output, "input_text", f"{where}.output"))
            body = {"type": "function_call_output", "call_id": item.call_id, "output": text}
        case _:
            raise RequestError(
                f"An item of the type {item.type[:64]!r} is not supported.",
                code="unsupported_content",
                param=f"{where}.type",
            )
    prefix = _PREFIXES[str(body["type"])]
    return {"id": item.id or new_id(prefix), "status": status, **body}


def _need(item: InputItem, where: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise required(f"{where}.{name}")


def _parts(content: str | Sequence[Part], kind: str, where: str, *, refusals: bool = False) -> list[Json]:
    if isinstance(content, str):
        return [_part(kind, content)]
    parts: list[Json] = []
    for index, part in enumerate(content):
        if part.type in _TEXTS and part.text is not None:
            parts.append(_part(kind, part.text))
        elif part.type == "refusal" and part.refusal is not None and refusals:
            parts.append({"type": "refusal", "refusal": part.refusal})
        elif part.type in _TEXTS:
            raise required(f"{where}[{index}].text")
        else:
            raise unreadable(part.type, f"{where}[{index}]")
    return parts


def _part(kind: str, text: str) -> Json:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _joined(parts: Iterable[Json]) -> str:
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in parts)


def messages_of(items: Iterable[Json]) -> list[Json]:
    """Messages of `/v1/chat/completions` for input items and output items.

    A call belongs to the assistant message it follows, since the model wrote both in one message, and reasoning to the
    one that follows it.
    """
    messages: list[Json] = []
    thought: Json = {}
    for item in items:
        match item["type"]:
            case "message":
                content = item["content"]
                assert isinstance(content, list), "made by input_items"
                said: Json = {"role": item["role"], "content": _joined(content)}
                messages.append(said | thought if item["role"] == "assistant" else said)
                thought = {}
            case "reasoning":
                content = item.get("content")
                thought = {"reasoning_content": _joined(content)} if isinstance(content, list) and content else {}
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if thought or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None} | thought)
                    thought = {}
                calls = messages[-1].setdefault("tool_calls", [])
                assert isinstance(calls, list), "made here"
                calls.append(call)
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            case _:
                pass  # a file search: its result is in the answer
    return messages


LOGPROBS = "message.output_text.logprobs"
SERVED_TOOLS = ("function", "file_search")
_FUNCTION = {"name", "description", "parameters", "strict"}  # fields of a tool
_ECHOED = {  # fields of a request that its response repeats
    "background",
    "instructions",
    "max_output_tokens",
    "metadata",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "store",
    "truncation",
    "user",
}
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?")


def search_of(asked: ResponseRequest) -> tuple[int, ResponseTool | None]:
    """Index and value of the first `file_search` tool."""
    return next(((index, tool) for index, tool in enumerate(asked.tools) if tool.type == "file_search"), (0, None))


def chat_body(asked: ResponseRequest, items: Sequence[Json]) -> Json:
    """The equivalent body of `/v1/chat/completions`. `items`: the whole conversation."""
    messages = messages_of(items)
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    wants_logprobs = LOGPROBS in asked.include or bool(asked.top_logprobs)
    body: Json = {
        "model": asked.model,
        "messages": messages,
        "max_completion_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "logprobs": wants_logprobs,
        "top_logprobs": (asked.top_logprobs or 0) if wants_logprobs else None,
        "reasoning_effort": asked.reasoning.effort,
        "response_format": _response_format(asked.text.format),
        "paceline": asked.paceline.model_dump(exclude_unset=True),
        "stop": asked.stop,
        "continue_final_message": asked.continue_final_message,
    }
    body = asked.onto(body)
    functions = [
        tool.model_dump(include=_FUNCTION, exclude_none=True) for tool in asked.tools if tool.type == "function"
    ]
    choice = _choice(asked)
    if functions:
        body |= {
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": choice,
            "parallel_tool_calls": asked.parallel_tool_calls,
        }
    elif choice not in ("auto", "none"):
        raise RequestError(
            "tool_choice asks for a call, but no tool that is served here is given.", param="tool_choice"
        )
    return body


@contextmanager
def as_written(asked: ResponseRequest) -> Iterator[None]:
    """Rename the field of a RequestError raised inside to its name in `/v1/responses`."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        named = _NAMES.get(re.split(r"[.\[]", param)[0])
        tool = _TOOL.match(param)
        if named is not None:
            error.param = named
        elif tool is not None:
            given = [index for index, one in enumerate(asked.tools) if one.type == "function"]
            number = int(tool[1])
            error.param = f"tools[{given[number] if number < len(given) else number}]{param[tool.end() :]}"
        raise


def _choice(asked: ResponseRequest) -> object:
    """`tool_choice` in the form of `/v1/chat/completions`."""
    choice = asked.tool_choice
    if isinstance(choice, str):
        return choice
    if choice.type == "function":
        if choice.name is None:
            raise required("tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type == "allowed_tools":
        names = [tool.name for tool in choice.tools if tool.type == "function" and tool.name is not None]
        if not names:
            return "none"
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if choice.type == "file_search" and search_of(asked)[1] is not None:
        return "auto"  # documents are read for every answer
    raise RequestError(f"tool_choice of the type {choice.type[:64]!r} is not supported.", param="tool_choice.type")


def _response_format(text: ResponseTextFormat) -> Json | None:
    if text.type == "text":
        return None
    fields = text.model_dump(by_alias=True, exclude_none=True)
    return {"type": "json_schema", "json_schema": fields} if text.type == "json_schema" else fields


def first_state(asked: ResponseRequest, response: str, created: int, sampling: SamplingParams) -> Json:
    """The response before anything is written, with every field of OpenAI's schema.

    `created`: Unix time, s. `sampling`: with defaults filled in.
    """
    return {
        "id": response,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "max_tool_calls": None,
        "output": [],
        "reasoning": asked.reasoning.model_dump(),
        "service_tier": "default",
        "usage": None,
        **asked.model_dump(include=_ECHOED),
        **({} if asked.conversation_id is None else {"conversation": {"id": asked.conversation_id}}),
        "temperature": sampling.temperature,
        "text": {
            "format": asked.text.format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": asked.text.verbosity or "medium",
        },
        "tool_choice": _shown(asked.tool_choice),
        "tools": [_tool(tool) for tool in asked.tools if tool.type in SERVED_TOOLS],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
    }


def _shown(choice: str | ToolChoice) -> object:
    if isinstance(choice, str):
        return choice
    return choice.model_dump(include=None if choice.type == "allowed_tools" else {"type", "name"}, exclude_none=True)


def _tool(tool: ResponseTool) -> Json:
    if tool.type == "function":
        return tool.model_dump(include={"type", *_FUNCTION})
    options = tool.ranking_options or RankingOptions()
    return {
        "type": tool.type,
        "vector_store_ids": tool.vector_store_ids or [],
        "max_num_results": tool.max_num_results,
        "filters": None if tool.filters is None else tool.filters.model_dump(),
        "ranking_options": {"ranker": options.ranker, "score_threshold": options.score_threshold},
    }
