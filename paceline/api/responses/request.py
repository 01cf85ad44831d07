"""Conversion of a request to `/v1/responses` to a chat body, and to the initial state of its response. Pure.

A response is generated as a chat completion: `chat.request.chat_call` checks and fills in the common fields. Its errors
are translated back to the field names of `/v1/responses`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from paceline.api.generation.unsupported import refuse_forms
from paceline.api.responses.items import messages_of
from paceline.api.responses.schema import ResponseRequest, ResponseTextFormat, ResponseTool, ToolChoice
from paceline.api.vector_stores.search import RankingOptions
from paceline.core.sampling.sampler import SamplingParams
from paceline.errors import RequestError

Json = dict[str, object]

LOGPROBS = "message.output_text.logprobs"
SERVED_TOOLS = ("function", "file_search")
UNSERVED = {  # fields that refer to state which is not kept here
    "prompt": "Prompt templates are not kept here; send instructions and input",
}
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?")


def check(body: Mapping[str, object], asked: ResponseRequest) -> None:
    """Raises RequestError (400) for fields that are not supported, missing or contradictory."""
    refuse_forms(body)
    for name, sentence in UNSERVED.items():
        if body.get(name) is not None:
            raise RequestError(f"{sentence} (in `{name}`).", code="unsupported_parameter", param=name)
    if body.get("input") is None and asked.previous_response_id is None and asked.conversation is None:
        raise RequestError("The field input is required.", param="input")
    if asked.conversation is not None and asked.previous_response_id is not None:
        raise RequestError("conversation and previous_response_id exclude each other.", param="conversation")
    if asked.conversation is not None and not asked.store:
        raise RequestError("A conversation keeps what is said in it, so store must be true.", param="store")
    if asked.background and not asked.store:
        raise RequestError("A response in the background can only be fetched if store is true.", param="background")
    for index, tool in enumerate(asked.tools):
        if tool.type == "function" and not tool.name:
            raise RequestError(f"The field tools[{index}].name is required.", param=f"tools[{index}].name")
    first, _ = search_of(asked)
    if any(tool.type == "file_search" for tool in asked.tools[first + 1 :]):
        raise RequestError("There may be one tool of the type file_search.", param="tools")
    text = asked.text.format
    if text.type == "json_schema":
        for name, value in (("name", text.name), ("schema", text.schema_)):
            if value is None:
                raise RequestError(f"The field text.format.{name} is required.", param=f"text.format.{name}")


def search_of(asked: ResponseRequest) -> tuple[int, ResponseTool | None]:
    """Index and value of the first `file_search` tool."""
    return next(((index, tool) for index, tool in enumerate(asked.tools) if tool.type == "file_search"), (0, None))


def chat_body(asked: ResponseRequest, items: Sequence[Json]) -> Json:
    """The equivalent body of `/v1/chat/completions`. `items`: the whole conversation."""
    messages = messages_of(items)
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    wants_logprobs = LOGPROBS in asked.include or bool(asked.top_logprobs)
    body: Json = {
        "model": asked.model,
        "messages": messages,
        "max_completion_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "logprobs": wants_logprobs,
        "top_logprobs": (asked.top_logprobs or 0) if wants_logprobs else None,
        "response_format": _response_format(asked.text.format),
        "paceline": asked.paceline.model_dump(exclude_unset=True),
        "stop": asked.stop,
        "continue_final_message": asked.continue_final_message,
    }
    body = asked.onto(body)
    functions = [tool for tool in asked.tools if tool.type == "function"]
    choice = _choice(asked)
    if functions:
        body |= {
            "tools": [{"type": "function", "function": _function(tool)} for tool in functions],
            "tool_choice": choice,
            "parallel_tool_calls": asked.parallel_tool_calls,
        }
    elif choice not in ("auto", "none"):
        raise RequestError(
            "tool_choice asks for a call, but no tool that is served here is given.", param="tool_choice"
        )
    return body


@contextmanager
def as_written(asked: ResponseRequest) -> Iterator[None]:
    """Rename the field of a RequestError raised inside to its name in `/v1/responses`."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        named = _NAMES.get(re.split(r"[.\[]", param)[0])
        tool = _TOOL.match(param)
        if named is not None:
            error.param = named
        elif tool is not None:
            given = [index for index, one in enumerate(asked.tools) if one.type == "function"]
            number = int(tool[1])
            error.param = f"tools[{given[number] if number < len(given) else number}]{param[tool.end() :]}"
        raise


def _choice(asked: ResponseRequest) -> object:
    """`tool_choice` in the form of `/v1/chat/completions`."""
    choice = asked.tool_choice
    if isinstance(choice, str):
        return choice
    if choice.type == "function":
        if choice.name is None:
            raise RequestError("The field tool_choice.name is required.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type == "allowed_tools":
        names = [tool.name for tool in choice.tools if tool.type == "function" and tool.name is not None]
        if not names:
            return "none"
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if choice.type == "file_search" and search_of(asked)[1] is not None:
        return "auto"  # documents are read for every answer
    raise RequestError(f"tool_choice of the type {choice.type[:64]!r} is not supported.", param="tool_choice.type")


def _response_format(text: ResponseTextFormat) -> Json | None:
    match text.type:
        case "text":
            return None
        case "json_object":
            return _present({"type": "json_object", "schema": text.schema_})
        case "regex" | "grammar":
            return _present({"type": text.type, "pattern": text.pattern, "grammar": text.grammar})
        case "json_schema":
            schema: Json = {
                "name": text.name,
                "schema": text.schema_,
                "strict": text.strict,
                "description": text.description,
            }
            return {"type": "json_schema", "json_schema": _present(schema)}


def _function(tool: ResponseTool) -> Json:
    names = ("name", "description", "parameters", "strict")
    return _present({name: getattr(tool, name) for name in names})


def _present(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def first_state(asked: ResponseRequest, response: str, created: int, sampling: SamplingParams) -> Json:
    """The response before anything is written, with every field of OpenAI's schema.

    `created`: Unix time, s. `sampling`: with defaults filled in.
    """
    return {
        "id": response,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": asked.background,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata,
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        **({} if asked.conversation_id is None else {"conversation": {"id": asked.conversation_id}}),
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.store,
        "temperature": sampling.temperature,
        "text": {
            "format": asked.text.format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": asked.text.verbosity or "medium",
        },
        "tool_choice": _shown(asked.tool_choice),
        "tools": [_tool(tool) for tool in asked.tools if tool.type in SERVED_TOOLS],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": asked.truncation,
        "usage": None,
        "user": asked.user,
    }


def _shown(choice: str | ToolChoice) -> object:
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        return choice.model_dump(exclude_none=True)
    return _present({"type": choice.type, "name": choice.name})


def _tool(tool: ResponseTool) -> Json:
    if tool.type == "function":
        names = ("type", "name", "description", "parameters", "strict")
        return {name: getattr(tool, name) for name in names}
    options = tool.ranking_options or RankingOptions()
    return {
        "type": tool.type,
        "vector_store_ids": tool.vector_store_ids or [],
        "max_num_results": tool.max_num_results,
        "filters": None if tool.filters is None else tool.filters.model_dump(),
        "ranking_options": {"ranker": options.ranker, "score_threshold": options.score_threshold},
    }
