"""Fields of OpenAI's API that ask for something this server does not do: refused by name, never ignored.

Hints (user, metadata, store, service_tier, prompt_cache_key, reasoning_effort, verbosity, prediction …) are accepted
without effect, since they promise nothing about the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import RequestError


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Raises RequestError (400) that names the first such field. Null counts as absent."""
    if body.get("modalities") not in (None, [], ["text"]):
        raise _unsupported("modalities", 'Only ["text"] is supported')
    for name in ("audio", "web_search_options"):
        if body.get(name) is not None:
            raise _unsupported(name, "It is not supported")


def unreadable(kind: str, where: str) -> RequestError:
    """The refusal of a part of a message, such as an image. where: it stands."""
    return RequestError(
        f"This model reads text only: a part of the type {kind[:64]!r} is not supported ({where}).",
        code="unsupported_content",
        param=where,
    )


def _unsupported(param: str, sentence: str) -> RequestError:
    return RequestError(f"{sentence} (in `{param}`).", code="unsupported_parameter", param=param)
