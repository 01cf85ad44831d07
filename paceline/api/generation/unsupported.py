"""Fields of OpenAI's API that ask for something this server does not do: refused by name, never ignored.

Hints (user, metadata, store, service_tier, prompt_cache_key, reasoning_effort, verbosity, prediction …) are accepted
without effect, since they promise nothing about the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

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


_FORMS = {  # of other servers: each promises something about the text of an answer, where it says anything
    "guided_whitespace_pattern": "White space of JSON is fixed here: one blank at most, after a comma or colon",
    "format": "It is a field of /api/chat and /api/generate: send response_format",
    "structural_tag": "It is not supported: send tools, or a grammar",
    "grammar_lazy": "A grammar holds for the whole answer here",
    "allowed_token_ids": "It is not supported: send a logit_bias, or a form of the answer",
    "bad_words": "It is not supported: send a logit_bias",
    "include_stop_str_in_output": "Stop strings are never part of an answer here",
    "use_beam_search": "Answers are sampled here",
    "echo": "Only what is written anew is returned; /v1/completions has echo",
}


def refuse_forms(body: Mapping[str, object], *, served: Collection[str] = ()) -> None:
    """Raises RequestError (400) for a form of the answer that is not known here. `served`: names that the endpoint has.
    What asks for nothing (null, false, "", []) counts as absent."""
    for name, sentence in _FORMS.items():
        if body.get(name) and name not in served:
            raise _unsupported(name, sentence)


def _unsupported(param: str, sentence: str) -> RequestError:
    return RequestError(f"{sentence} (in `{param}`).", code="unsupported_parameter", param=param)
