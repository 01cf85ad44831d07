"""`/v1/chat/completions`: the body with OpenAI's names and ranges, its tools, and its conversion to requests of
generations: validated, defaults filled in, one seed per choice.

Unknown fields are ignored, since front ends send many, but for those that ask for something this server does not do.
docs/api.md lists all fields. Source: openai-openapi 2.3.0, CreateChatCompletionRequest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from paceline.api.chat.tools import ToolCallParser
from paceline.api.generation.request import (
    MAX_SCHEMAS,
    check_relations,
    choices_of,
    form_of,
    generation_of,
    size_of_schema,
)
from paceline.api.generation.schema import (
    MAX_TOOLS,
    Hint,
    JsonFormat,
    JsonObject,
    Metadata,
    Name,
    SamplingFields,
    SchemaFormat,
    kind_tag,
    required,
    unreadable,
    unsupported,
)
from paceline.api.http.auth import Identity
from paceline.api.http.body import Schema
from paceline.api.models import chat_model, switched
from paceline.core.sampling.sampler import Constraint
from paceline.engine.base import ModelInfo
from paceline.engine.families import BY_NAME, HERMES, SWITCH, ToolFormat, texts_of, with_thinking
from paceline.errors import RequestError
from paceline.runtime.service import AskedPrompt, GenerateRequest, Service, SharedPrompt
from paceline.wire.messages import MAX_TEMPLATE

MAX_MESSAGES = 1000
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Part(Schema):
    """One part of a message's content: text or a refusal. A file has become text before."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Schema):
    name: str
    arguments: str = ""


class CustomCall(Schema):
    name: str
    input: str = ""


class ToolCall(Schema):
    """A call the model made in an earlier turn, here or at another server."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class Message(Schema):
    role: Role
    content: str | list[Part] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None  # what the model thought before, as it was sent
    reasoning: str | None = None  # the same, as vLLM and OpenRouter name it


class AskedReasoning(Schema):
    """Thinking as OpenRouter asks for it."""

    effort: Hint | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    enabled: bool | None = None


class PredictedPart(Schema):
    type: Literal["text"] = "text"
    text: str


class AskedPrediction(Schema):
    """Text that the answer may repeat, such as a file that it changes: drafts alone, which change no token."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[PredictedPart], Field(max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Function(Schema):
    """A function that the model may call. Unless `strict`, schema keywords that cannot be enforced are ignored."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None  # a JSON schema of an object; without one the function has no parameters
    strict: bool = False


class Tool(Schema):
    type: str = "function"
    function: Function | None = None


class FunctionName(Schema):
    name: str


class NamedChoice(Schema):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Schema):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Schema):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedChoice, Tag("<function>")]
    | Annotated[AllowedChoice, Tag("<allowed_tools>")],
    Discriminator(
        kind_tag,
        custom_error_type="tool_choice",
        custom_error_message='it must be "none", "auto", "required", or an object of the type "function" or '
        '"allowed_tools"',
    ),
]
LegacyChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("<word>")] | Annotated[FunctionName, Tag("<function>")],
    Discriminator(
        kind_tag, custom_error_type="function_call", custom_error_message='it must be "none", "auto" or an object'
    ),
]


class ChatRequest(SamplingFields):
    refused: ClassVar = {"audio": "It is not supported", "web_search_options": "It is not supported"}

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    function_call: LegacyChoice | None = None
    chat_template_kwargs: JsonObject = Field(default_factory=dict)  # as at vLLM
    enable_thinking: bool | None = None  # one of them
    reasoning_effort: Hint | None = None  # likewise; "none": no thinking
    reasoning: AskedReasoning | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # as at vLLM
    include_reasoning: bool = True
    continue_final_message: bool | None = None  # default: where the last message is the assistant's
    add_generation_prompt: bool | None = None  # the opposite, as in vLLM
    prediction: AskedPrediction | None = None

    # Accepted without effect: they identify the user or are hints, and promise nothing about the answer.
    user: Hint | None = None
    metadata: Metadata = Field(default_factory=dict)
    store: bool = False
    service_tier: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    prompt_cache_retention: Hint | None = None
    verbosity: Hint | None = None

    @property
    def thinking_tokens(self) -> int | None:
        """Tokens of thinking at most; None where the request has no bound."""
        if self.template.get(SWITCH) is False:
            return 0  # also of a model whose template has no switch
        of_reasoning = None if self.reasoning is None else self.reasoning.max_tokens
        return of_reasoning if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def template(self) -> JsonObject:
        """Variables that the request sets in chat templates."""
        asked = self.reasoning or AskedReasoning()
        effort = asked.effort or self.reasoning_effort
        thinks = asked.enabled if self.enable_thinking is None else self.enable_thinking
        if thinks is None and effort is not None:
            thinks = effort != "none"
        fields: JsonObject = {} if thinks is None else {SWITCH: thinks}
        return fields | ({} if effort in (None, "none") else {"reasoning_effort": effort}) | self.chat_template_kwargs

    @model_validator(mode="before")
    @classmethod
    def _writes_text(cls, body: object) -> object:
        if isinstance(body, dict) and body.get("modalities") not in (None, [], ["text"]):
            raise unsupported("modalities", 'Only ["text"] is supported')
        return body


# ---- tools ----------------------------------------------------------------------------------------------------------
# Functions are described in the system message, in the words of Hermes and Qwen2.5, since not every chat template
# supports tools, with the model's own format of calls; `api/chat/tools.py` parses the answer. Which functions can be
# called is enforced by the constraint alone.
_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, some of which may be called."""

    format: ToolFormat  # the model's
    functions: tuple[Function, ...]  # described to the model
    callable: tuple[str, ...]  # names of those it may call
    required: bool = False
    named: bool = False  # the client named the one function to call
    parallel: bool = True
    legacy: bool = False  # requested and answered in the form of `functions`

    def constraint(self, content: Constraint | None) -> Constraint:
        """The constraint on the answer. `content`: that on an answer without calls."""
        tools = [
            {"name": function.name, "parameters": parameters_of(function), "strict": function.strict}
            for function in self.functions
            if function.name in self.callable
        ]
        fields: dict[str, object] = {"tools": tools, "required": self.required, "parallel": self.parallel}
        fields |= {} if self.format is HERMES else {"format": self.format.name}
        param = "" if content is None else content.param
        if content is not None and not self.required:
            if content.kind == "grammar":
                raise RequestError(f"{param} holds for the whole answer: it cannot go with tools.", param=param)
            fields["content"] = {"kind": content.kind, "text": content.text}
        return Constraint("tools", json.dumps(fields, ensure_ascii=False), param=param)

    def instructions(self) -> str:
        """The description of the functions for the system message."""
        lines = "\n".join(json.dumps(_signature(function), ensure_ascii=False) for function in self.functions)
        how = (
            "a JSON object with its name and arguments within <tool_call></tool_call>:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
        if self.format is not HERMES:
            arguments = '{"<parameter-name>": "<value>"}' if self.format.tagged else "<args-json-object>"
            how = f"exactly in this form:\n{self.format.written([('<function-name>', arguments)])}"
        return (
            "# Tools\n\nFunctions that may be called to help with the user's request, as JSON within "
            f"<tools></tools>:\n<tools>\n{lines}\n</tools>\n\nTo call one, write {how}"
        )

    def parser(self) -> ToolCallParser:
        schemas = {function.name: function.parameters or {} for function in self.functions}

        def is_text(name: str, key: str) -> bool:
            properties = schemas.get(name, {}).get("properties")
            schema = properties.get(key) if isinstance(properties, dict) else None
            return isinstance(schema, dict) and texts_of(schema) is not None

        return ToolCallParser(self.format, is_text)


def tool_use(asked: ChatRequest, model: ModelInfo) -> ToolUse | None:
    """The tools of a request; None when none may be called. Raises RequestError (400) that names the field."""
    if asked.functions and asked.tools:
        raise RequestError("functions is the older name of tools: only one of them may be given.", param="functions")
    legacy = bool(asked.functions) or asked.function_call is not None
    functions = _checked(asked.functions, "functions", "") if legacy else _functions(asked.tools)
    choice, param = (asked.function_call, "function_call") if legacy else (asked.tool_choice, "tool_choice")
    names, must_call, named = tuple(function.name for function in functions), choice == "required", False
    match choice:
        case NamedChoice(function=FunctionName(name=name)) | FunctionName(name=name):
            names, must_call, named = (name,), True, True
        case AllowedChoice(allowed_tools=allowed):
            names = tuple(dict.fromkeys(tool.function.name for tool in allowed.tools))
            must_call = allowed.mode == "required"
        case "required" if not functions:
            raise RequestError("tool_choice may only be required when there are tools.", param=param)
        case _ if choice == "none" or not functions:
            return None
    for name in names:
        if all(function.name != name for function in functions):
            raise RequestError(f"{param} names the function {name[:64]!r}, which is not among the tools.", param=param)
    parallel = asked.parallel_tool_calls and not (legacy or named)
    return ToolUse(BY_NAME[model.tools], functions, names, must_call, named, parallel, legacy)


def _functions(tools: Sequence[Tool]) -> tuple[Function, ...]:
    functions: list[Function] = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(
                f"Only tools of the type function are served, not {tool.type[:64]!r}.",
                code="unsupported_parameter",
                param=f"tools[{index}].type",
            )
        if tool.function is None:
            raise required(f"tools[{index}].function")
        functions.append(tool.function)
    return _checked(functions, "tools", ".function")


def _checked(functions: Sequence[Function], field: str, inner: str) -> tuple[Function, ...]:
    """Check that names differ and parameters are schemas of objects. Function i is at `field`[i]`inner` of the body."""
    names: set[str] = set()
    size = 0
    for index, function in enumerate(functions):
        where = f"{field}[{index}]{inner}"
        if function.name in names:
            raise RequestError(f"Two functions have the name {function.name}.", param=f"{where}.name")
        names.add(function.name)
        schema = function.parameters or {}
        if schema.get("type", "object") != "object":
            raise RequestError('The schema of parameters must have the type "object".', param=f"{where}.parameters")
        size += size_of_schema(schema, f"{where}.parameters") + len(function.description or "")
        if size > MAX_SCHEMAS:
            raise RequestError(f"{field} takes more than {MAX_SCHEMAS} characters.", param=field)
    return tuple(functions)


def parameters_of(function: Function) -> dict[str, object]:
    return _NO_PARAMETERS if function.parameters is None else {"type": "object"} | function.parameters


def _signature(function: Function) -> dict[str, object]:
    described = {} if function.description is None else {"description": function.description}
    body = {"name": function.name} | described | {"parameters": parameters_of(function)}
    return {"type": "function", "function": body}


# ---- the format of an answer ----------------------------------------------------------------------------------------
def format_instructions(asked: ChatRequest, tools: ToolUse | None) -> str | None:
    """The description of the schema of `response_format` for the system message.

    None where a function must be called: such an answer has no content.
    """
    wanted = asked.response_format
    if tools is not None and tools.required:
        return None
    name, about, described = "", "", wanted.schema_ if isinstance(wanted, JsonFormat) else None
    if isinstance(wanted, SchemaFormat):
        named = wanted.json_schema
        described, name = named.schema_, f", {named.name}"
        about = f" ({named.description})" if named.description else ""
    if described is None:
        return None
    only = "" if tools is not None else ", and nothing else"
    return f"Answer with JSON of this schema{name}{about}{only}:\n{json.dumps(described, ensure_ascii=False)}"


# ---- a conversation as the input of a chat template: one role and one text per message ------------------------------
# Parts are joined, and `developer` becomes `system`. Earlier tool calls are written in the model's own format, their
# results in that of Hermes and Qwen2.5, in the order of the calls. Images and sound are refused by name: a text model
# cannot read them; files have become text before (`api/generation/attachments.py`). What a model has thought before an
# earlier answer stands before it, between its marks, as the model wrote it: which of it the model reads again is its
# template's to say.
_ROLES = {"developer": "system", "function": "tool"}  # here, since instructions are appended to the system message


def conversation(
    messages: Sequence[Message], model: ModelInfo, instructions: Sequence[str] = (), system: str = ""
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
        role, content = _role(message), _content(message, model, f"messages[{index}]")
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
            reasoning = message.reasoning_content or message.reasoning
            if reasoning and model.thinking is not None:
                content = with_thinking(reasoning, content, model.thinking)
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


def _content(message: Message, model: ModelInfo, where: str) -> str:
    calls = _calls(message, where) if message.role == "assistant" else []
    content = message.content
    if message.role == "assistant":
        content = message.refusal if content is None else content
    elif content is None:
        raise RequestError(f"A message of the role {message.role} needs content.", param=f"{where}.content")
    text = content if isinstance(content, str) else ""
    if isinstance(content, list):
        text = "".join(_part(part, message.role, f"{where}.content[{i}]") for i, part in enumerate(content))
    return "\n".join(part for part in (text, BY_NAME[model.tools].written(calls) if calls else "") if part)


def _part(part: Part, role: str, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None and role == "assistant":
        return part.refusal
    if part.type in ("text", "refusal"):
        raise RequestError(f"A part of the type {part.type} needs a text.", param=where)
    raise unreadable(part.type, where)


def _calls(message: Message, where: str) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for index, call in enumerate(message.tool_calls):
        if call.function is not None:
            calls.append((call.function.name, _json(call.function.arguments)))
        elif call.custom is not None:
            calls.append((call.custom.name, json.dumps(call.custom.input, ensure_ascii=False)))
        else:
            raise RequestError("A call needs a function.", param=f"{where}.tool_calls[{index}].function")
    if message.function_call is not None:
        calls.append((message.function_call.name, _json(message.function_call.arguments)))
    return calls


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
    asked = switched(asked, asked.model, service)
    check_relations(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    tools = tool_use(asked, model)
    form = form_of(asked)
    instructions = [text for text in (tools and tools.instructions(), format_instructions(asked, tools)) if text]
    if size_of_schema(asked.template, "chat_template_kwargs") > MAX_TEMPLATE:
        raise RequestError(f"It takes more than {MAX_TEMPLATE} characters.", param="chat_template_kwargs")
    request = generation_of(
        asked,
        model,
        service,
        identity,
        AskedPrompt(
            messages=begun(asked, conversation(asked.messages, model, instructions, model.system)),
            template=asked.template,
            predicted="" if asked.prediction is None else asked.prediction.text,
            # In a workflow each choice has agents of its own, who find other passages.
            shared=SharedPrompt() if asked.n > 1 and asked.paceline.workflow is None else None,
        ),
        documents=documents,
        limit=limit,
        form=form if tools is None else tools.constraint(form),
        is_free=tools is not None and not tools.required and form is None,
        top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        thinking_tokens=asked.thinking_tokens,
    )
    return ChatCall(asked, tools, choices_of(request, asked.n))
