"""Request body of `/v1/chat/completions`, with OpenAI's names and ranges.

Unknown fields are ignored, since front ends send many; `generation.request.refuse_unsupported` refuses those that ask
for something this server does not do. docs/api.md lists all fields. Source: openai-openapi 2.3.0,
CreateChatCompletionRequest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from paceline.api.generation.request import refuse_forms, refuse_unsupported
from paceline.api.generation.schema import MAX_METADATA, MAX_TOOLS, Hint, JsonObject, Name, SamplingFields, kind_tag
from paceline.api.http.body import Schema

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
    continue_final_message: bool | None = None  # default: where the last message is the assistant's
    add_generation_prompt: bool | None = None  # the opposite, as in vLLM

    # Accepted without effect: they identify the user or are hints, and promise nothing about the answer.
    user: Hint | None = None
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=MAX_METADATA),
    ] = Field(default_factory=dict)
    store: bool = False
    service_tier: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    prompt_cache_retention: Hint | None = None
    verbosity: Hint | None = None
    reasoning_effort: Hint | None = None
    prediction: JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _served(cls, body: object) -> object:
        """Raises RequestError for a field that asks for what is not done here."""
        if isinstance(body, dict):
            refuse_unsupported(body)
            refuse_forms(body)
        return body
