"""Conversion of Ollama's requests to bodies of `/v1/chat/completions` and, for raw prompts, `/v1/completions`. Pure.

`chat_call` and `completion_call` check and fill in the rest. What is not done here is refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.api.chat.request import MAX_MESSAGES, Tool
from paceline.api.generation.schema import (
    MAX_TOOLS,
    Extension,
    FormFields,
    JsonObject,
    Penalty,
    Probability,
    Stops,
    Temperature,
    unsupported,
)
from paceline.api.http.body import Json, Schema

# ---- bodies below `/api`, with Ollama's names -----------------------------------------------------------------------
# Unknown fields and options are ignored, as Ollama does. docs/api.md lists all fields. Source: docs/api.md of Ollama
# and the types of ollama-python 0.6.
OTHER_SAMPLERS = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}  # options with the value at which each has no effect

KeepAlive = float | str


class Options(Schema):
    """Those with an effect here. A `num_predict` of 0 or less means up to the context, a `seed` of -1 none."""

    num_predict: int | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class Function(Schema):
    name: str
    arguments: JsonObject = Field(default_factory=dict)


class ToolCall(Schema):
    function: Function


class Message(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] = Field(default_factory=list)  # refused where there are any
    tool_calls: list[ToolCall] = Field(default_factory=list)
    thinking: str | None = None  # before an earlier answer


class GenerationFields(FormFields):
    """Fields that `/api/chat` and `/api/generate` have in common."""

    refused: ClassVar = {
        "suffix": "Nothing can be written in front of a suffix here: the model only continues",
        "images": "This model reads text only",
        "template": "The model's own chat template is used; send a prompt with raw",
        "context": "Earlier answers are not kept as tokens; send the conversation to /api/chat",
    }
    model: str
    stream: bool = True
    format: Literal["", "json"] | JsonObject | None = None
    options: Options = Field(default_factory=Options)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    paceline: Extension = Field(default_factory=Extension)

    think: bool | str | None = None  # an effort as well; refused where the model does not think
    keep_alive: KeepAlive | None = None  # without effect: the model stays
    truncate: bool | None = None  # without effect: what is too long is refused
    shift: bool | None = None  # likewise

    @model_validator(mode="before")
    @classmethod
    def _without_other_samplers(cls, body: dict[str, object]) -> dict[str, object]:
        given = body.get("options")
        for name, without in OTHER_SAMPLERS.items():
            if isinstance(given, dict) and given.get(name) not in (None, without):
                raise unsupported(f"options.{name}", "Not supported: sample with temperature, top_k, top_p and min_p")
        return body


class ChatBody(GenerationFields):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)


class GenerateBody(GenerationFields):
    prompt: str = ""
    system: str | None = None
    raw: bool = False


class EmbedBody(Schema):
    model: str
    input: str | list[str]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool = True
    options: JsonObject | None = None  # without effect, and so is the next
    keep_alive: KeepAlive | None = None

    @model_validator(mode="after")
    def _is_cut(self) -> Self:
        if not self.truncate:
            raise unsupported(
                "truncate", "A text beyond the embedder's window is always cut; its length is in /v1/models"
            )
        return self


class EmbeddingsBody(Schema):
    """The body of `/api/embeddings`, the older way."""

    model: str
    prompt: str = ""
    options: JsonObject | None = None  # without effect, and so is the next
    keep_alive: KeepAlive | None = None


class ShowBody(Schema):
    model: str | None = None
    name: str | None = None  # the older name of `model`
    verbose: bool = False  # without effect


# ---- answers --------------------------------------------------------------------------------------------------------
class AnswerLine(BaseModel):
    """One line of a stream, or the whole answer. `error` alone, where it fails after its beginning."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    created_at: str | None = None
    done: bool | None = None
    error: str | None = None


class Embedded(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedOne(BaseModel):
    embedding: list[float]


class ModelDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(BaseModel):
    models: list[ModelEntry]


class Shown(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str


class Release(BaseModel):
    version: str
    paceline: str


def model_name(name: str) -> str:
    return name.removesuffix(":latest")


def chat_body(asked: ChatBody | GenerateBody) -> Json:
    body = _common(asked)
    if isinstance(asked, ChatBody):
        body["messages"] = [_message(message, index) for index, message in enumerate(asked.messages)]
        body["tools"] = [tool.model_dump(exclude_none=True) for tool in asked.tools]
    else:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        body["messages"] = [*system, {"role": "user", "content": asked.prompt}]
    if asked.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif asked.format:
        schema = {"name": "answer", "schema": asked.format}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(asked.think, bool):
        body["enable_thinking"] = asked.think
    elif asked.think:
        body["reasoning_effort"] = asked.think
    body |= {"max_tokens": _limit(asked.options), "logprobs": asked.logprobs}
    return asked.onto(body | ({"top_logprobs": asked.top_logprobs} if asked.logprobs else {}))


def raw_body(asked: GenerateBody) -> Json:
    for name, value in (("format", asked.format), ("system", asked.system)):
        if value:
            raise unsupported(name, "It has no place in a raw prompt")
    limit = _limit(asked.options)
    body = _common(asked) | {"prompt": asked.prompt, "max_tokens": 2**31 - 1 if limit is None else limit}
    return asked.onto(body | ({"logprobs": asked.top_logprobs or 0} if asked.logprobs else {}))


def _common(asked: GenerationFields) -> Json:
    options = asked.options
    return {
        "model": model_name(asked.model),
        "stream": asked.stream,
        **options.model_dump(exclude={"num_predict", "repeat_penalty", "seed"}),
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "paceline": asked.paceline.model_dump(exclude_unset=True),
    }


def _limit(options: Options) -> int | None:
    return options.num_predict if options.num_predict is not None and options.num_predict > 0 else None


def _message(message: Message, index: int) -> Json:
    if message.images:
        raise unsupported(f"messages[{index}].images", "This model reads text only")
    functions = [
        {"name": call.function.name, "arguments": json.dumps(call.function.arguments, ensure_ascii=False)}
        for call in message.tool_calls
    ]
    calls = [{"type": "function", "function": function} for function in functions]
    said: Json = {"role": message.role, "content": message.content or "", "reasoning_content": message.thinking}
    return said | ({"tool_calls": calls} if calls else {})
