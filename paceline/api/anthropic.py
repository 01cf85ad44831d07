"""Anthropic's Messages API, `POST /v1/messages` and `/v1/messages/count_tokens`, as a shape over chat completions.

A request becomes a chat body, which `chat.request.chat_call` checks and fills in, and events take Anthropic's form. A
tool's result becomes a message of the role `tool`; a system message stays in its place; thinking of earlier turns is
the chat template's to show or not. What a text model cannot read is refused by name. Betas are known by their fields,
whatever the headers `anthropic-beta` and `anthropic-version` say. Not here: images, PDFs, Anthropic's own tools,
batches.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.output import admit_chat, cited, optional, summary
from paceline.api.chat.request import MAX_MESSAGES, ChatCall, ChatRequest, chat_call
from paceline.api.chat.tools import AnswerReader, TextOutput, Thought, ToolCallArguments, ToolCallStart, arguments_of
from paceline.api.generation.attachments import AnswerRoute
from paceline.api.generation.schema import (
    MAX_STOPS,
    MAX_TOOLS,
    Extension,
    FormFields,
    Hint,
    JsonObject,
    Name,
    Probability,
    Stop,
    Temperature,
    required,
    unreadable,
)
from paceline.api.generation.streaming import AnswerWriter, sent, sse_named
from paceline.api.http.body import Json, Schema, encode_json, parse
from paceline.api.http.errors import ErrorShape, Failure
from paceline.api.http.routing import Addresses, Caller, ServiceDep, SettingsDep
from paceline.api.observation import request_id
from paceline.api.openapi import answered, keyed_router
from paceline.core.attached import framed
from paceline.errors import RequestError
from paceline.runtime.service import Citation, GenerateEvent, GenerationResult

# ---- bodies, with Anthropic's names and ranges ----------------------------------------------------------------------
# Unknown fields are ignored. docs/api.md lists all fields. Source: the types of anthropic-sdk-python,
# `types/message_create_params.py`.
READ = frozenset({"text", "thinking", "search_result", "tool_use", "tool_result", "tool_reference", "compaction"})
CHANGES = frozenset({"tool_addition", "tool_removal"})  # of the tools that are offered


class Block(Schema):
    """One block of a message. Which fields are required depends on its type; of one that is not read, only that is
    kept. Documents have become text before."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool = False
    title: str | None = None
    tool_name: str | None = None  # that a search for tools has found
    tool: ToolChange | None = None
    tool_changes: list[Block] | None = None  # before a compaction

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in READ | CHANGES:
            return {"type": kind}
        return value


class Message(Schema):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None
    clear_at: Literal["next_user_message", "never"] = "never"  # of the role `system`


class Tool(Schema):
    """A tool of the client. Anthropic's own, which have another `type`, are refused."""

    type: str = "custom"
    name: Name
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool = False
    defer_loading: bool = False  # offered once a message refers to it


class ToolChange(Schema):
    """A tool that is offered or withdrawn from a message on: by its name, or with its definition."""

    type: str
    name: str | None = None
    definition: Tool | None = None


class ToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Schema):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Schema):
    format: OutputFormat | None = None
    effort: Hint | None = None


class ThinkingConfig(Schema):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # else it is told in full


class PromptFields(FormFields):
    """Fields that `/v1/messages` and `/v1/messages/count_tokens` have in common."""

    refused: ClassVar = {
        "container": "No code is run here",
        "mcp_servers": "No MCP server is called here: offer its tools yourself",
        "thread": "No threads are kept here: send their messages",
    }
    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None  # the older place of `output_config.format`
    thinking: ThinkingConfig = Field(default_factory=lambda: ThinkingConfig(type="disabled"))
    cache_control: JsonObject | None = None  # without effect


class CountRequest(PromptFields):
    """The body of `/v1/messages/count_tokens`."""


class MessagesRequest(PromptFields):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stream: bool = False
    paceline: Extension = Field(default_factory=Extension)

    # Accepted without effect.
    metadata: JsonObject | None = None
    service_tier: Hint | None = None
    context_management: JsonObject | None = None


# ---- answers --------------------------------------------------------------------------------------------------------
class Usage(BaseModel):
    """`input_tokens` are those of the prompt that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, object]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: Usage


class MessageEvent(BaseModel):
    """The data of one event, which has the event's name as `type`."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class TokenCount(BaseModel):
    input_tokens: int


_DROPPED = ("redacted_thinking", "fallback")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(asked: PromptFields) -> Json:
    """The equivalent body of `/v1/chat/completions`, for an answer of one token if it has no limit."""
    messages: list[Json] = []
    if asked.system:
        messages.append({"role": "system", "content": _text(asked.system, "system")})
    last_user = max((index for index, message in enumerate(asked.messages) if message.role == "user"), default=-1)
    for index, message in enumerate(asked.messages):
        if message.clear_at == "never" or index > last_user:
            messages += _messages(message, f"messages[{index}].content")
    body: Json = {"model": asked.model, "messages": messages}
    tools = [_tool(tool, where) for where, tool in _offered(asked)]
    if tools:
        body["tools"] = tools
    if asked.tool_choice is not None:
        body |= _choice(asked.tool_choice)
    wanted = asked.output_config.format or asked.output_format
    if wanted is not None:
        named = {"name": "answer", "schema": wanted.schema_, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    thinking = asked.thinking
    body |= {
        "enable_thinking": False if thinking.type == "disabled" else True if thinking.type == "enabled" else None,
        "thinking_token_budget": thinking.budget_tokens,
        "reasoning_effort": asked.output_config.effort,
        # Who has not asked for thinking reads the first block as the answer.
        "include_reasoning": thinking.type != "disabled" and thinking.display != "omitted",
    }
    body = asked.onto(body)
    if isinstance(asked, MessagesRequest):
        body |= asked.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream"})
        body |= {"stop": asked.stop_sequences, "paceline": asked.paceline.model_dump(exclude_unset=True)}
    return body


def _messages(message: Message, where: str) -> list[Json]:
    if message.role == "system":
        text = _text([block for block in _blocks(message) if block.type not in CHANGES], where)
        return [{"role": "system", "content": text}] if text else []
    if message.content is None:
        raise required(where)
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, where)]
    results: list[Json] = []
    texts: list[str] = []
    for index, block in enumerate(message.content):
        if block.type == "tool_result":
            results.append(_result(block, f"{where}[{index}]"))
        else:
            texts.append(_block(block, f"{where}[{index}]"))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(blocks: Sequence[Block], where: str) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.name is None:
                raise required(f"{where}[{index}].name")
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif block.type not in _DROPPED:
            texts.append(_block(block, f"{where}[{index}]"))
    said: Json = {"role": "assistant", "content": "\n".join(texts), "reasoning_content": "\n".join(thoughts)}
    return said | ({"tool_calls": calls} if calls else {})


def _result(block: Block, where: str) -> Json:
    if block.tool_use_id is None:
        raise required(f"{where}.tool_use_id")
    text = _text(block.content or "", f"{where}.content")
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block(block: Block, where: str) -> str:
    """The text of a block. Raises RequestError for one that is no text."""
    match block:
        case Block(type="text", text=str(text)):
            return text
        case Block(type="text"):
            raise required(f"{where}.text")
        case Block(type="search_result", content=list(content)):
            return framed(block.title or "", _text(content, f"{where}.content"))
        case Block(type="tool_reference", tool_name=str(name)):
            return f"The tool {name} can be called now."
        case Block(type="compaction"):
            return block.content if isinstance(block.content, str) else ""
        case _:
            raise unreadable(block.type, where)


def _blocks(message: Message) -> list[Block]:
    return [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content or []


def _offered(asked: PromptFields) -> list[tuple[str, Tool]]:
    """The tools that may be called at the end of the conversation, each with its place in the body."""
    tools = {tool.name: (f"tools[{index}]", tool) for index, tool in enumerate(asked.tools)}
    offered = {name: not tool.defer_loading for name, (_, tool) in tools.items()}

    def read(blocks: Sequence[Block], where: str) -> None:
        for index, block in enumerate(blocks):
            here = f"{where}[{index}]"
            if block.type == "tool_reference" and block.tool_name is not None:
                offered[block.tool_name] = True
            elif block.type in CHANGES:
                name, defined = _changed(block.tool, f"{here}.tool")
                if defined is not None:
                    tools[name] = (f"{here}.tool.definition", defined)
                offered[name] = block.type == "tool_addition"
            elif block.type == "tool_result" and isinstance(block.content, list):
                read(block.content, f"{here}.content")
            read(block.tool_changes or (), f"{here}.tool_changes")

    for number, message in enumerate(asked.messages):
        read(_blocks(message), f"messages[{number}].content")
    return [tools[name] for name, is_offered in offered.items() if is_offered and name in tools]


def _changed(change: ToolChange | None, where: str) -> tuple[str, Tool | None]:
    """Name, and definition if it is given, of a tool that is offered or withdrawn."""
    match change:
        case ToolChange(type="tool_definition", definition=Tool() as defined):
            return defined.name, defined
        case ToolChange(type="tool_reference", name=str(name)):
            return name, None
        case _:
            raise RequestError(
                f"A tool is changed by a tool_reference or a tool_definition alone ({where}).",
                code="unsupported_parameter",
                param=where,
            )


def _tool(tool: Tool, where: str) -> Json:
    if tool.type != "custom":
        raise RequestError(
            f"Only tools of the client are called, not Anthropic's {tool.type[:64]!r} ({where}.type).",
            code="unsupported_parameter",
            param=f"{where}.type",
        )
    function: Json = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Json:
    parallel: Json = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type != "tool":
        return parallel | {"tool_choice": _CHOICES[choice.type]}
    if choice.name is None:
        raise required("tool_choice.name")
    return parallel | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


# Anthropic's error envelope. Source: anthropic-sdk-python 2.13 and docs.anthropic.com, "Errors".
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # by these words agents know that they must shorten their history


class ErrorDetail(BaseModel):
    type: str
    message: str
    details: JsonObject | None = None  # of a refused `thread`: by it the SDK's tool runner goes on without


class AnthropicError(BaseModel):
    """Every answer of `/v1/messages` that reports an error."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


def envelope(failure: Failure) -> Json:
    kind = _TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    message = (_TOO_LONG if failure.code == "context_length_exceeded" else "") + failure.message
    error: Json = {"type": kind, "message": message}
    if failure.param == "thread":
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id.get()}


SHAPE = ErrorShape("/v1/messages", AnthropicError, envelope, id_header=b"request-id")


class MessageWriter(AnswerWriter):
    """Content blocks while they are written, and the events that tell of them: a whole answer holds what a streamed one
    adds up to. Citations belong to the text that ends the answer; where a call ends it, it has none."""

    last = b""

    def __init__(self, call: ChatCall, prompt_tokens: int, links: Addresses) -> None:
        """prompt_tokens: as known before the answer; 0: unknown. links: of citations."""
        self.id = f"msg_{secrets.token_hex(12)}"
        self._call = call
        self._prompt_tokens = prompt_tokens
        self._links = links
        parser = None if call.tools is None else call.tools.parser()
        self._reader = AnswerReader(parser, thinks=call.asked.include_reasoning)
        self._blocks: list[Json] = []
        self._open = ""  # type of the block being written
        self._pieces: list[str] = []  # of it
        self._end: Json = {}  # fields of the message that its end has
        self._extension: Json = {}

    def framed(self, piece: Json) -> bytes:
        return sse_named(str(piece["type"]), encode_json(piece))

    def ping(self) -> bytes:
        return self.framed({"type": "ping"})

    def begin(self) -> Sequence[Json]:
        unended = {"stop_reason": None, "stop_sequence": None, "usage": _tokens(self._prompt_tokens, 0, 0)}
        return [{"type": "message_start", "message": self._message([]) | unended}]

    def take(self, index: int, event: GenerateEvent) -> Sequence[Json]:  # noqa: ARG002  # there is one generation
        events: list[Json] = []
        for part in self._reader.read(event):
            match part:
                case Thought(text, step):
                    if step is None or self._open != "text":  # one that ends within the text is in the report alone
                        events += self._add("thinking", text)
                case TextOutput(text):
                    events += self._add("text", text)
                case ToolCallStart(_, name):
                    events += self._begin("tool_use", id=f"toolu_{secrets.token_hex(12)}", name=name, input={})
                case ToolCallArguments(_, text):
                    self._pieces.append(text)
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events + self._ended(event) if isinstance(event, GenerationResult) else events

    def end(self) -> Sequence[Json]:
        return [{"type": "message_stop"}]

    def whole(self) -> Json:
        return self._message(self._blocks) | self._end | self._extension

    def _message(self, content: list[Json]) -> Json:
        model = self._call.asked.model
        return {"id": self.id, "type": "message", "role": "assistant", "model": model, "content": content}

    def _ended(self, done: GenerationResult) -> list[Json]:
        events: list[Json] = []
        if self._open == "text" and (found := [_citation(one, self._links) for one in done.citations]):
            events = [self._delta({"type": "citations_delta", "citation": one}) for one in found]
            self._blocks[-1]["citations"] = found
        reason = "max_tokens" if done.reason == "length" else "stop_sequence" if done.stop else "end_turn"
        if reason == "end_turn" and self._reader.calls:
            reason = "tool_use"
        stopped = {"stop_reason": reason, "stop_sequence": done.stop or None}
        self._end = stopped | {"usage": _usage(done)}
        self._extension = optional("paceline", summary(self._call.report, [done], self._links))
        last = {"type": "message_delta", "delta": stopped, "usage": _usage(done)} | self._extension
        return [*events, *self._close(), last]

    def _add(self, kind: str, text: str) -> list[Json]:
        """Text of that kind, in the block that is open if it is one."""
        signature = {"signature": ""} if kind == "thinking" else {}  # nobody signs it
        begun = [] if self._open == kind else self._begin(kind, **{kind: ""}, **signature)
        self._pieces.append(text)
        return [*begun, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, kind: str, **fields: object) -> list[Json]:
        closed = self._close()
        self._open = kind
        self._blocks.append({"type": kind, **fields})
        start = {
            "type": "content_block_start",
            "index": len(self._blocks) - 1,
            "content_block": {"type": kind, **fields},
        }
        return [*closed, start]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        text, kind, self._open, self._pieces = "".join(self._pieces), self._open, "", []
        self._blocks[-1] |= {"input": arguments_of(text)} if kind == "tool_use" else {kind: text}
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _citation(citation: Citation, links: Addresses) -> Json:
    """As of a search by the server: what clients know to have a URL."""
    told: Json = {"type": "web_search_result_location", "cited_text": citation.passage, **cited(citation, links)}
    return told | {"encrypted_index": ""}  # by which Anthropic finds its own results again


def _usage(done: GenerationResult) -> Json:
    tokens = _tokens(done.prompt_tokens, int(done.stats.get("cached_tokens", 0)), done.completion_tokens)
    thought = done.stats.get("reasoning_tokens")
    return tokens | ({} if thought is None else {"output_tokens_details": {"thinking_tokens": int(thought)}})


def _tokens(prompt: int, cached: int, output: int) -> Json:
    """Anthropic counts cached tokens apart from the others of the prompt."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


# ---- POST /v1/messages -----------------------------------------------------------------------------------------------
router = keyed_router("anthropic", "chat", prefix="/v1/messages", route=AnswerRoute, error=AnthropicError)


@router.post("", responses=answered(MessageAnswer, stream=MessageEvent))
async def create_message(
    asked: MessagesRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Answer a conversation, in Anthropic's shape."""
    call = chat_call(parse(ChatRequest, chat_body(asked)), service, caller, documents=settings.documents)
    generations = await admit_chat(request, call, service)
    writer = MessageWriter(call, generations[0].prompt_tokens, settings.addresses.of(request))
    return sent(generations, writer, stream=asked.stream)


@router.post("/count_tokens")
async def count_tokens(asked: CountRequest, service: ServiceDep, caller: Caller) -> TokenCount:
    """Count the tokens of a conversation, without documents."""
    call = chat_call(parse(ChatRequest, chat_body(asked)), service, caller, documents=0)
    async with service.of(call.requests[0].model) as served:
        tokens = await served.tokenize_chat(call.requests[0].prompt.messages, caller.key)
    return TokenCount(input_tokens=len(tokens))
