"""What a request to `/v1/chat/completions` may say, with OpenAI's names and ranges.

An explicit null means absent: typed clients send them. Unknown fields are ignored, since front ends send many; inside
`paceline` they are refused, since they can only be meant for us. What asks for something this server does not do is
not here: see `unsupported`; which fields are honoured is told in docs/api.md. Source: openai-openapi 2.3.0,
CreateChatCompletionRequest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.config import JsonDict

from paceline.core.aggregation.registry import RuleName
from paceline.runtime.service import Drafts, OnLoss, Privacy

MAX_MESSAGES = 1000
MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_LENGTH = 64  # characters
MAX_BIASES = 300
MAX_DOCUMENTS = 64
MAX_TOOLS = 128
MAX_METADATA = 16  # pairs
MAX_SEARCHED = 8  # vector stores in one search
MAX_HINT = 1024  # characters of a field that is read by nobody
NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"  # of functions and of response formats

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Hint = Annotated[str, Field(max_length=MAX_HINT)]
StoreId = Annotated[str, Field(min_length=1, max_length=64)]
StoreIds = Annotated[list[StoreId], Field(min_length=1, max_length=MAX_SEARCHED)]
JsonObject = dict[str, object]  # a JSON schema, whatever it says
Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _kind(value: object) -> str | None:
    """The branch of a union that a word or an object with a `type` is meant for. Branches' names stand in <>."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


_Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[_Stops, BeforeValidator(_as_list, json_schema_input_type=Stop | _Stops)]


def _nullable(schema: JsonDict) -> None:
    """What `openapi.json` says of a `Schema`: null is as good as leaving a field out, where that may be done."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(properties, dict):
        return
    for name, field in properties.items():
        if not isinstance(field, dict) or (isinstance(required, list) and name in required):
            continue
        branches = field.get("anyOf")
        if not isinstance(branches, list) or {"type": "null"} not in branches:
            rest: JsonDict = {key: field.pop(key) for key in ("description", "default") if key in field}
            properties[name] = {"anyOf": [field, {"type": "null"}], **rest}


class Schema(BaseModel):
    """Strict about types (no "1" for 1), lenient about fields it does not know, blind to nulls."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, frozen=True, json_schema_extra=_nullable
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class Part(Schema):
    """One part of a message's content. Which types are served is for `messages` to say."""

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
    """A call the model made in an earlier turn, under whatever server that was."""

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
    """One that the model may call. Not `strict`: what of the parameters cannot be kept to is left out."""

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
        _kind,
        custom_error_type="tool_choice",
        custom_error_message='it must be "none", "auto", "required", or an object of the type "function" or '
        '"allowed_tools"',
    ),
]
LegacyChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("<word>")] | Annotated[FunctionName, Tag("<function>")],
    Discriminator(
        _kind, custom_error_type="function_call", custom_error_message='it must be "none", "auto" or an object'
    ),
]


class TextFormat(Schema):
    type: Literal["text"]


class JsonFormat(Schema):
    type: Literal["json_object"]


class NamedSchema(Schema):
    """Not `strict`: what of the schema cannot be kept to is left out."""

    name: Name
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool = False


class SchemaFormat(Schema):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _kind,
        custom_error_type="response_format",
        custom_error_message='it must be an object of the type "text", "json_object" or "json_schema"',
    ),
]


class StreamOptions(Schema):
    include_usage: bool = False


class Extension(Schema):
    """The one object that holds our additions."""

    model_config = ConfigDict(extra="forbid")

    strategy: str | None = None
    device: str | None = None
    privacy: Privacy = "document-private"
    documents: Annotated[int, Field(ge=0, le=MAX_DOCUMENTS)] | None = None
    vector_stores: StoreIds | None = None  # what this side reads in place of its own documents, named `default`
    aggregator: RuleName | None = None
    drafts: Drafts = "tree"
    rescoring: bool = True
    on_device_loss: OnLoss = "continue"
    report: bool = False


class SamplingFields(Schema):
    """How tokens are drawn and where an answer ends: the same in every endpoint that generates text.

    Where None, what the server is set to counts, then what the model recommends, then OpenAI's default.
    """

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = Field(
        default_factory=dict
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    paceline: Extension = Field(default_factory=Extension)


class ChatRequest(SamplingFields):
    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    function_call: LegacyChoice | None = None

    # Accepted without effect: they say who asks or hint at how, and promise nothing about the answer.
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
