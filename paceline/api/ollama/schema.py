"""Bodies below `/api`, with Ollama's names. Answers are streamed unless `stream` is false.

Unknown fields and options are ignored, as Ollama does. docs/api.md lists all fields. Source: docs/api.md of Ollama
and the types of ollama-python 0.6.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.api.chat.schema import MAX_MESSAGES, Tool
from paceline.api.generation.schema import (
    MAX_TOOLS,
    Extension,
    FormFields,
    JsonObject,
    Penalty,
    Probability,
    Stops,
    Temperature,
)
from paceline.api.http.validation import Schema

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


class GenerationFields(FormFields):
    """Fields that `/api/chat` and `/api/generate` have in common."""

    model: str
    stream: bool = True
    format: Literal["", "json"] | JsonObject | None = None
    options: Options = Field(default_factory=Options)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    paceline: Extension = Field(default_factory=Extension)

    think: bool | str | None = None  # refused where it asks for thinking
    keep_alive: KeepAlive | None = None  # without effect: the model stays
    truncate: bool | None = None  # without effect: what is too long is refused
    shift: bool | None = None  # likewise


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
