"""What a request to `/v1/responses` says, with OpenAI's names and ranges. For the manners of the models see `schema`.

Tools of a type that is not served are skipped, as clients send the tools of hosts they know; an item of the input of a
type that is not served is refused by name, since the answer would miss what was said. Source: openai-openapi 2.3.0,
CreateResponse.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from paceline.api.chat.schema import MAX_MESSAGES, Part, Role
from paceline.api.generation.schema import (
    MAX_METADATA,
    MAX_SEARCHED,
    MAX_TOOLS,
    Extension,
    Hint,
    JsonObject,
    Probability,
    StoreId,
    Temperature,
)
from paceline.api.http.validation import Schema
from paceline.api.vector_stores.search import MAX_RESULTS, FilterField, RankingOptions

MAX_ID = 64  # characters

Include = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    # What these name is never part of an answer here: asking for it changes nothing.
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class InputItem(Schema):
    """One item of the input. Which fields a type needs is for `responses_items` to say."""

    type: str = "message"
    id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    status: str | None = None
    role: Role | None = None
    content: str | list[Part] | None = None
    call_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class ResponseTool(Schema):
    """`function` or `file_search`; anything else is skipped."""

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
    """`function`, `allowed_tools`, or a tool that is built in."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolName], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)


class ResponseTextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Schema):
    format: ResponseTextFormat = Field(default_factory=ResponseTextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint, without effect


class ResponseRequest(Schema):
    model: str
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: Text = Field(default_factory=Text)
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Include] = Field(default_factory=list)
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] = Field(default_factory=dict)
    store: bool = True
    stream: bool = False
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    previous_response_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    user: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    service_tier: Hint | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # ours: OpenAI has it in chat only
    paceline: Extension = Field(default_factory=Extension)


class RetrieveQuery(Schema):
    """Query strings have no types, so "true" is true here."""

    model_config = ConfigDict(strict=False)

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # the last sequence number that was received


class DeletedResponse(Schema):
    """What a deletion answers."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
