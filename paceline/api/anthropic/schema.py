"""Bodies of `/v1/messages`, with Anthropic's names and ranges.

Unknown fields are ignored. docs/api.md lists all fields. Source: the types of anthropic-sdk-python,
`types/message_create_params.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.api.chat.schema import MAX_MESSAGES
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
)
from paceline.api.http.validation import Schema


class Source(Schema):
    """The source of a document; only `text` is read."""

    type: str
    data: str | None = None


class Block(Schema):
    """One block of a message. Which fields are required depends on its type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool = False
    source: Source | str | None = None
    title: str | None = None


class Message(Schema):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(Schema):
    """A tool of the client. Anthropic's own, which have another `type`, are refused."""

    type: str = "custom"
    name: Name
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool = False


class ToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Schema):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Schema):
    format: OutputFormat | None = None
    effort: Hint | None = None  # without effect


class PromptFields(FormFields):
    """Fields that `/v1/messages` and `/v1/messages/count_tokens` have in common."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None  # the older place of `output_config.format`

    # Accepted without effect.
    thinking: JsonObject | None = None
    cache_control: JsonObject | None = None


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
