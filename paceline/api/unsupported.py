"""Fields of OpenAI's API that ask for something this server does not do yet: refused by name, never ignored.

What only hints (user, metadata, store, service_tier, prompt_cache_key, reasoning_effort, verbosity, prediction …)
changes no promise and is accepted without effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import RequestError


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Raises RequestError (400) that names the first such field. Null, and what asks for nothing, is absent."""
    choice = body.get("tool_choice")
    legacy_choice = body.get("function_call")
    if choice not in (None, "none"):
        raise _unsupported("tool_choice", 'Tools are not supported yet; only "none" is accepted')
    if legacy_choice not in (None, "none"):
        raise _unsupported("function_call", 'Functions are not supported yet; only "none" is accepted')
    # Told not to call anything, a model may be shown tools or not: the promise kept is the same.
    if body.get("tools") and choice is None:
        raise _unsupported("tools", "Tools are not supported yet")
    if body.get("functions") and legacy_choice is None:
        raise _unsupported("functions", "Functions are not supported yet")
    if _type_of(body.get("response_format")) not in (None, "text"):
        raise _unsupported("response_format", 'Only the type "text" is supported yet')
    if body.get("modalities") not in (None, [], ["text"]):
        raise _unsupported("modalities", 'Only ["text"] is supported')
    for name in ("audio", "web_search_options"):
        if body.get(name) is not None:
            raise _unsupported(name, "It is not supported")


def _type_of(response_format: object) -> object:
    if response_format is None:
        return None
    return response_format.get("type", "") if isinstance(response_format, Mapping) else ""


def _unsupported(param: str, sentence: str) -> RequestError:
    return RequestError(f"{sentence} (in `{param}`).", code="unsupported_parameter", param=param)
