"""Errors as HTTP: OpenAI's error envelope with all four keys, unless the route speaks another API's.

Maps an exception to its status and, where a retry may succeed, to Retry-After. An unexpected exception becomes a 500
whose text reveals no internals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel
from starlette.responses import Response

from paceline.api.http.body import Json, encode_json
from paceline.errors import LinkError, PacelineError, RequestError, StorageError, is_exhausted

ABSENT: Final[Mapping[str, str]] = {
    "/v1/audio": "Sound is neither read nor written: transcribe it elsewhere (LocalAI has this path) and "
    "send the text to /v1/chat/completions.",
    "/v1/images": "Images are not made here: the model reads and writes text (/v1/chat/completions).",
    "/v1/videos": "Videos are not made here: the model reads and writes text (/v1/chat/completions).",
    "/v1/moderations": "Nothing is moderated here: ask the model in /v1/chat/completions, with your categories as its "
    "response_format.",
    "/v1/batches": "There are no batches: send the requests at the same time, they are computed together, or use "
    '/v1/responses with "background": true.',
    "/v1/fine_tuning": "Models are not trained here: train one elsewhere, and serve it: `paceline serve --model`.",
    "/v1/assistants": "OpenAI has ended assistants: use /v1/responses, with /v1/conversations and /v1/vector_stores.",
    "/v1/threads": "OpenAI has ended threads: use /v1/conversations with /v1/responses.",
    "/v1/uploads": "Files arrive in one piece: /v1/files takes up to 64 MiB.",
    "/v1/realtime": "There are no sessions of sound: stream text from /v1/chat/completions or /v1/responses.",
    "/v1/evals": "Nothing is evaluated here: lm-evaluation-harness and others speak to /v1/completions.",
    "/v1/containers": "No code is run here: offer a function tool of your own in /v1/responses.",
    "/v1/organization": "There are no organizations: keys are made and revoked with `paceline keys`.",
    "/v1/complete": "Anthropic has ended text completions: use /v1/messages, or OpenAI's /v1/completions.",
    "/v1/messages/batches": "There are no batches: send the requests to /v1/messages at the same time.",
    "/v1/responses/input_tokens": "Tokens of a text or conversation are counted by /tokenize.",
    "/v1/responses/compact": 'A conversation that is too long is cut with "truncation": "auto" in /v1/responses.',
    "/v1/rerankers": "One reranker is served, by /v1/rerank.",
    "/api/pull": "A model is chosen when the server starts: `paceline serve --model NAME`.",
    "/api/push": "Models are not published from here.",
    "/api/create": "Models are not made here: serve a folder with `paceline serve --model FOLDER`.",
    "/api/copy": "Models are not copied here: serve one under another name with `--name`.",
    "/api/delete": "Models are not deleted from here.",
    "/api/blobs": "Models are not made here: serve a folder with `paceline serve --model FOLDER`.",
    # llama.cpp's own
    "/props": "The model and its context (max_model_len) stand in /v1/models, the state of this side in /v1/status.",
    "/slots": "There are no slots: answers share one engine. What is under way stands in /metrics.",
    "/completion": "A raw prompt is continued by /v1/completions, a conversation by /v1/chat/completions.",
    "/infill": "Text is not filled in between a prefix and a suffix: /v1/completions continues a prefix.",
    "/apply-template": "/tokenize takes messages and gives the tokens that the model is sent (return_token_strs).",
    "/embedding": "Embeddings are made by /v1/embeddings.",
    "/lora-adapters": "Adapters are not loaded here: merge one into the weights, and serve these with --model.",
    # those of vLLM and text-generation-inference
    "/score": "A query and passages are compared by /v1/rerank.",
    "/v1/score": "A query and passages are compared by /v1/rerank.",
    "/classify": "Nothing is classified here: ask /v1/chat/completions, the classes an enum of its response_format.",
    "/pooling": "Embeddings are made by /v1/embeddings.",
    "/generate": "A raw prompt is continued by /v1/completions, a conversation by /v1/chat/completions.",
    "/generate_stream": 'A raw prompt is continued by /v1/completions with "stream": true.',
    "/redoc": "The description of this interface is /openapi.json, and a page for people is /docs.",
}
"""By the path and everything below it."""

_WITHOUT_VERSION: Final = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/embeddings",
    "/models",
    "/files",
    "/vector_stores",
    "/conversations",
    "/messages",
)


def hint_of(path: str) -> str:
    """A sentence after a space for an unknown path that many clients ask for; empty for any other."""
    below = [absent for absent in ABSENT if path == absent or path.startswith(absent + "/")]
    if below:
        return " " + ABSENT[max(below, key=len)]
    if path.startswith(_WITHOUT_VERSION):
        return f" Did you mean /v1{path}?"
    if path.startswith("/v1/v1/"):
        return f" Did you mean {path.removeprefix('/v1')}?"
    return f" Did you mean {path.rstrip('/')}?" if path.endswith("/") and path.strip("/") else ""


_log = logging.getLogger("paceline.api")


RETRY_AFTER_S = 1  # a slot or a link is usually free again by then; OpenAI's clients obey it up to 120
RETRY: Final = {"Retry-After": str(RETRY_AFTER_S)}


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self, shape: ErrorShape | None = None) -> Json:
        """shape: None for OpenAI's, with all four keys, `code` a string or null: SDKs in typed languages require it."""
        if shape is not None:
            return shape.encode(self)
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self, shape: ErrorShape | None = None) -> bytes:
        return encode_json(self.envelope(shape))

    def response(self, shape: ErrorShape | None = None) -> Response:
        return Response(
            self.json(shape),
            status_code=self.status,
            media_type="application/json",
            headers=dict(self.headers),
        )


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How another API than OpenAI's writes errors, and names a request."""

    prefix: str  # of its paths
    model: type[BaseModel]  # describes it
    encode: Callable[[Failure], Json]
    id_header: bytes = b""  # for the id of the request, besides `x-request-id`


class RefusedError(PacelineError):
    """A request that is refused before its route."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def lacks(scope: str) -> RefusedError:
    """The refusal of a key without a scope, as OpenAI has it."""
    message = (
        f"You have insufficient permissions for this operation. Missing scopes: {scope}. Use a key that has it: "
        f"`paceline keys create NAME --scope {scope}` at the server makes one."
    )
    asks = {"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'}  # RFC 6750, 3.1
    return RefusedError(Failure(403, message, code="insufficient_scope", headers=asks))


def failure_of(error: BaseException) -> Failure:
    match error:
        case RefusedError():
            return error.failure
        case RequestError():
            headers = {"Retry-After": str(error.retry_after or RETRY_AFTER_S)} if error.status in (429, 503) else {}
            if error.status == 408:  # the rest of the request is not waited for (RFC 9110, 15.5.9)
                headers = {"Connection": "close"}
            if error.code == "answer_too_late":  # official clients would have it computed twice more
                headers["x-should-retry"] = "false"
            return Failure(error.status, str(error), error.type, error.code, error.param, headers)
        case LinkError():
            return Failure(503, str(error), "server_error", "link_lost", headers=RETRY)
        case StorageError():
            _log.error("%s", error)  # with the path, which is nobody else's business
            if error.full:
                message = "The server's disk is full: nothing was kept or removed."
                return Failure(507, message, "server_error", "disk_full")
            what = "reach its database" if error.away else "use its files"
            message = f"The server cannot {what}; its log says why."
            return Failure(503, message, "server_error", "storage_unusable", headers=RETRY)
        case _ if is_exhausted(error):
            message = "The server has no thread or memory left for this request: ask again later."
            return Failure(503, message, "server_error", "overloaded", headers=RETRY)
        case PacelineError():
            return Failure(500, str(error), "server_error")
        case _:
            return Failure(500, "The server made a mistake while answering this request.", "server_error")


def http_failure(status: int, method: str, path: str, allow: str | None) -> Failure:
    """A fault found by the router: an unknown path, or a method it does not take."""
    if status == 404 or (status == 405 and path in ABSENT):  # `/v1/responses/compact` could be a response's id
        return Failure(404, f"There is no {path} here.{hint_of(path)}", code="unknown_url")
    if status == 405:
        headers = {"Allow": allow} if allow else {}
        takes = f" It takes {allow}." if allow else ""
        return Failure(405, f"{path} does not take {method}.{takes}", code="method_not_allowed", headers=headers)
    return Failure(status, f"{method} {path} cannot be served.")
