"""What a request to `/v1/chat/completions` may say, with OpenAI's names and ranges.

An explicit null means absent: typed clients send them. Unknown fields are ignored, since front ends send many; inside
`paceline` they are refused, since they can only be meant for us. What is known but not served yet is not here: see
`unsupported`. Source: openai-openapi 2.3.0, CreateChatCompletionRequest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paceline.core.rules import RuleName
from paceline.runtime.service import Drafts, OnLoss, Privacy

MAX_MESSAGES = 1000
MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_LENGTH = 64  # characters
MAX_BIASES = 300
MAX_DOCUMENTS = 64

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Schema(BaseModel):
    """Strict about types (no "1" for 1), lenient about fields it does not know, blind to nulls."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

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


class ToolCall(Schema):
    """A call the model made in an earlier turn, under whatever server that was."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall | None = None


class Message(Schema):
    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None


class StreamOptions(Schema):
    include_usage: bool = False


class Extension(Schema):
    """The one object that holds our additions."""

    model_config = ConfigDict(extra="forbid")

    strategy: str | None = None
    device: str | None = None
    privacy: Privacy = "document-private"
    documents: Annotated[int, Field(ge=0, le=MAX_DOCUMENTS)] | None = None
    aggregator: RuleName | None = None
    drafts: Drafts = "tree"
    on_device_loss: OnLoss = "continue"
    report: bool = False


class SamplingFields(Schema):
    """How tokens are drawn and where an answer ends: the same in every endpoint that generates text."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = Field(
        default_factory=dict
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] = Field(default_factory=list)
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
