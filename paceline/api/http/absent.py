"""Advice for paths that other servers have and this one has not: what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
    return ""
