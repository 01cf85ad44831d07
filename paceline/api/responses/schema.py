"""Request bodies of `/v1/responses`, with OpenAI's names and ranges.

Tools of an unknown type are skipped, since clients send the tools of other hosts too; input items of an unknown type
are refused by name, since the answer would lack their content. Source: openai-openapi 2.3.0, CreateResponse.
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
    FormFields,
    Hint,
    JsonObject,
    Probability,
    Stops,
    StoreId,
    Temperature,
)
from paceline.api.http.validation import Schema
from paceline.api.vector_stores.search import MAX_RESULTS, FilterField, RankingOptions

MAX_ID = 512  # characters

Include = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    # Accepted without effect: answers here never hold these.
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
    """One item of the input. Which fields are required depends on its type."""

    type: str = "message"
    id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    status: str | None = None
    role: Role | None = None
    content: str | list[Part] | None = None
    call_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool
    output: str | list[Part] | None = None


class ResponseTool(Schema):
    """A tool of the type `function` or `file_search`; other types are skipped."""

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
    """A choice of the type `function`, `allowed_tools`, or a built-in tool."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolName], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)


class ResponseTextFormat(Schema):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None
    pattern: str | None = None  # of `regex`
    grammar: str | None = None  # of `grammar`


class Text(Schema):
    format: ResponseTextFormat = Field(default_factory=ResponseTextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint, without effect


class ConversationRef(Schema):
    id: Annotated[str, Field(max_length=MAX_ID)]


class ResponseRequest(FormFields):
    model: str
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: Text = Field(default_factory=Text)
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stops = Field(default_factory=list)  # ours, as `continue_final_message`: OpenAI has it in chat only
    continue_final_message: bool = False
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
    conversation: Annotated[str, Field(max_length=MAX_ID)] | ConversationRef | None = None
    user: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    service_tier: Hint | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # ours: OpenAI has it in chat only
    paceline: Extension = Field(default_factory=Extension)

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class RetrieveQuery(Schema):
    """Query of a retrieval. Not strict about types: a query string has none."""

    model_config = ConfigDict(strict=False)

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # the sequence number received last


class DeletedResponse(Schema):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
