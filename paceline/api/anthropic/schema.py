"""Bodies of `/v1/messages`, with Anthropic's names and ranges.

Unknown fields are ignored. docs/api.md lists all fields. Source: the types of anthropic-sdk-python,
`types/message_create_params.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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

READ = frozenset({"text", "search_result", "tool_use", "tool_result", "tool_reference", "compaction"})
CHANGES = frozenset({"tool_addition", "tool_removal"})  # of the tools that are offered


class Block(Schema):
    """One block of a message. Which fields are required depends on its type; of one that is not read, only that is
    kept. Documents have become text before."""

    type: str
    text: str | None = None
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
        if isinstance(value, dict) and value.get("type") not in READ | CHANGES:
            return {"type": value.get("type")}
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
