"""Ollama's routes: tags, ps, version and show, chat, generate and embed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.chat.endpoint import admit_chat, read_chat
from paceline.api.chat.output import ChoiceBuilder, Json, MessageBuilder, Reporting, logprob_items, step_line, summary
from paceline.api.chat.request import ChatCall, chat_call
from paceline.api.chat.tools import ToolUse, arguments_of
from paceline.api.completions import CompletionCall, completion_call
from paceline.api.embeddings import MAX_BODY, MAX_INPUTS
from paceline.api.generation.fan_in import LateGeneration, must_load
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.http import sse
from paceline.api.http.auth import Identity
from paceline.api.http.body import S, parse, read_body, while_connected
from paceline.api.http.errors import ErrorShape, Failure, decode_object, encode_json
from paceline.api.http.pagination import answer
from paceline.api.models import any_model, chat_model, embedder, served_models
from paceline.api.observation import request_id
from paceline.api.ollama.request import (
    AnswerLine,
    ChatBody,
    EmbedBody,
    Embedded,
    EmbeddedOne,
    EmbeddingsBody,
    GenerateBody,
    ModelList,
    Release,
    ShowBody,
    Shown,
    chat_body,
    model_name,
    raw_body,
)
from paceline.api.routes import Route
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import EmbedderInfo, Embeddings, GenerateEvent, Generation, GenerationResult, Service

# Ollama's error envelope.


class OllamaError(BaseModel):
    """Every answer below `/api` that reports an error."""

    error: str


def envelope(failure: Failure) -> Mapping[str, object]:
    return {"error": failure.message}


SHAPE = ErrorShape("/api", OllamaError, envelope)


# `POST /api/embed`, and the older `POST /api/embeddings`. Texts beyond the embedder's window are cut to it.


class OllamaEmbedding:
    """The routes and the service they use. Holds no state of a request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/api/embed",
                endpoint=self.embed,
                summary="Turn texts into vectors, in Ollama's shape.",
                scope="embeddings",
                request=EmbedBody,
                response=Embedded,
                errors=SHAPE,
                refusals=(404,),
            ),
            Route(
                method="POST",
                path="/api/embeddings",
                endpoint=self.embed_one,
                summary="Turn one text into a vector, in Ollama's older shape.",
                scope="embeddings",
                request=EmbeddingsBody,
                response=EmbeddedOne,
                errors=SHAPE,
                refusals=(404,),
            ),
        )

    async def embed(self, request: Request) -> Response:
        began = time.monotonic()
        asked = await _parsed(EmbedBody, request)
        if not asked.truncate:
            raise RequestError(
                "A text beyond the embedder's window is always cut (in `truncate`); its length is in /v1/models.",
                code="unsupported_parameter",
                param="truncate",
            )
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        if len(texts) > MAX_INPUTS:
            raise RequestError(f"input holds {len(texts)} texts; at most {MAX_INPUTS} at once.", param="input")
        found = await self._vectors(request, asked.model, asked.dimensions, [text for text in texts if text])
        if len(found.vectors) < len(texts) and texts != [""]:
            raise RequestError("input holds an empty string: there is nothing to embed.", param="input")
        body = {
            "model": asked.model,
            "embeddings": found.vectors.tolist(),
            "total_duration": round((time.monotonic() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
        }
        return Response(await asyncio.to_thread(encode_json, body), media_type="application/json")

    async def embed_one(self, request: Request) -> Response:
        asked = await _parsed(EmbeddingsBody, request)
        found = await self._vectors(request, asked.model, None, [asked.prompt] if asked.prompt else [])
        return answer({"embedding": found.vectors[0].tolist() if len(found.vectors) else []})

    async def _vectors(self, request: Request, model: str, dimensions: int | None, texts: list[str]) -> Embeddings:
        """Without texts, with which clients load a model, none."""
        found = embedder(self._service, model_name(model))
        if dimensions not in (None, found.dimensions):
            raise RequestError(
                f"The vectors of {found.name} have {found.dimensions} dimensions and mean nothing when they are cut.",
                param="dimensions",
            )
        return await while_connected(request.receive, self._service.embed(texts))


async def _parsed(schema: type[S], request: Request) -> S:
    received = await read_body(request.receive, request.headers.get("content-length"), max_bytes=MAX_BODY)
    return await asyncio.to_thread(lambda: parse(schema, decode_object(received)))


# Encoders of answers in Ollama's shape, as lines of JSON (NDJSON) and in one piece.
#
# Calls of tools come whole, before the last line: Ollama's arguments are an object. There are no citations, but in
# `paceline`, where a report is asked for.


MEDIA_TYPE = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class LineMeta:
    """What all parts of one answer repeat."""

    model: str  # as asked
    chat: bool  # `/api/chat`, or `/api/generate`
    tools: ToolUse | None
    call: Reporting
    began: float  # s, monotonic

    def line(self, body: Json) -> Json:
        return {"model": self.model, "created_at": _now(), **body}

    def said(self, text: str, **more: object) -> Json:
        if self.chat:
            return {"message": {"role": "assistant", "content": text, **more}}
        return {"response": text, **more}

    def ending(self, done: GenerationResult, first: float | None) -> Json:
        """first: s, when the first text came."""
        end = time.monotonic()
        first = first or end
        report = summary(self.call, [done])
        return {
            "done": True,
            "done_reason": done.reason,
            "total_duration": _ns(end - self.began),
            "load_duration": 0,
            "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": _ns(first - self.began),
            "eval_count": done.completion_tokens,
            "eval_duration": _ns(end - first),
            **({} if report is None else {"paceline": report}),
        }


class AnswerLines:
    """Encoder of a streamed answer (`AnswerChunks`)."""

    headers: Mapping[str, str] = {**sse.HEADERS, "content-type": MEDIA_TYPE}

    def __init__(self, meta: LineMeta) -> None:
        self._meta = meta
        self._message = MessageBuilder(meta.tools)
        self._first: float | None = None

    def ping(self) -> bytes:
        return self._line(self._meta.said(""))

    def begin(self) -> bytes:
        return b""

    def take(self, index: int, event: GenerateEvent) -> bytes:  # noqa: ARG002  # there is one generation
        if isinstance(event, GenerationResult):
            text = _text(self._message.end(event))
            calls = _calls(self._message)
            lines = [self._meta.said(text)] if text else []
            lines += [self._meta.said("", tool_calls=calls)] if calls else []
            return b"".join(map(self._line, [*lines, self._meta.said("") | self._meta.ending(event, self._first)]))
        if event.step is not None:
            return self._line(self._meta.said("", thinking=step_line(event.step)))
        self._first = self._first or time.monotonic()
        text = _text(self._message.push(event.text))
        logprobs: Json = {"logprobs": logprob_items(event)} if event.logprobs else {}
        return self._line(self._meta.said(text) | logprobs) if text or logprobs else b""

    def end(self) -> bytes:
        return b""

    def fail(self, failure: Failure) -> bytes:
        return encode_json(envelope(failure)) + b"\n"

    def _line(self, body: Json) -> bytes:
        return encode_json(self._meta.line({"done": False} | body)) + b"\n"


class AnswerObject:
    """Encoder of an answer in one piece (`AnswerBody`): all that the lines would say."""

    def __init__(self, meta: LineMeta) -> None:
        self._meta = meta
        self._choice = ChoiceBuilder(meta.tools)
        self._first: float | None = None

    def take(self, index: int, event: GenerateEvent) -> None:  # noqa: ARG002
        if self._first is None and not isinstance(event, GenerationResult) and event.step is None:
            self._first = time.monotonic()
        self._choice.take(event)

    def body(self) -> bytes:
        choice = self._choice
        assert choice.done is not None, "an answer is written when it has ended"
        more = {"thinking": "".join(choice.reasoning), "tool_calls": _calls(choice.message)}
        said = self._meta.said(
            str(choice.message.message()["content"] or ""), **{name: value for name, value in more.items() if value}
        )
        logprobs: Json = {"logprobs": choice.logprobs} if choice.logprobs else {}
        return encode_json(self._meta.line(said | self._meta.ending(choice.done, self._first) | logprobs))


def _text(deltas: Sequence[Json]) -> str:
    return "".join(str(delta["content"]) for delta in deltas if "content" in delta)


def _calls(built: MessageBuilder) -> list[Json]:
    message: Mapping[str, Any] = built.message()
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [{"function": {"name": one["name"], "arguments": arguments_of(one["arguments"])}} for one in functions]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# `POST /api/chat` and `POST /api/generate`.


class OllamaGeneration:
    """The routes and the service they use. Holds no state of a request."""

    def __init__(self, service: Service, *, documents: int, keep_alive: float) -> None:
        self._service = service
        self._documents = documents
        self._keep_alive = keep_alive

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/api/chat",
                endpoint=self.chat,
                summary="Answer a conversation, in Ollama's shape.",
                scope="chat",
                request=ChatBody,
                response=AnswerLine,
                stream=AnswerLine,
                stream_type=MEDIA_TYPE,
                errors=SHAPE,
                refusals=(404,),
            ),
            Route(
                method="POST",
                path="/api/generate",
                endpoint=self.generate,
                summary="Answer one question, or continue a raw text, in Ollama's shape.",
                scope="chat",
                request=GenerateBody,
                response=AnswerLine,
                stream=AnswerLine,
                stream_type=MEDIA_TYPE,
                errors=SHAPE,
                refusals=(404,),
            ),
        )

    async def chat(self, request: Request) -> Response:
        body = await read_chat(request, self._service)
        asked = parse(ChatBody, body)
        if not asked.messages:
            return self._loaded(asked)
        return await self._answered(request, asked)

    async def generate(self, request: Request) -> Response:
        body = await read_chat(request, self._service)
        asked = parse(GenerateBody, body)
        if not asked.prompt:
            return self._loaded(asked)
        return await (self._continued(request, asked) if asked.raw else self._answered(request, asked))

    async def _answered(self, request: Request, asked: ChatBody | GenerateBody) -> Response:
        call = chat_call(chat_body(asked), self._service, request.state.identity, documents=self._documents)
        generations = await admit_chat(request, call, self._service)
        return self._response(request, asked, call, call.tools, generations)

    async def _continued(self, request: Request, asked: GenerateBody) -> Response:
        identity: Identity = request.state.identity
        if not identity.may("completions"):
            raise RequestError(
                "This key may not continue raw prompts: it needs the scope 'completions'.",
                status=403,
                code="insufficient_scope",
                param="raw",
            )
        call = completion_call(raw_body(asked), self._service, identity)
        request.state.model = call.model.name  # for the log

        async def prepare() -> Generation:
            prompt = await self._service.tokenize(asked.prompt, call.model.name)
            return await self._service.prepare(*call.requests([prompt]))

        async def begin() -> list[Generation]:
            if must_load(self._service, call.model.name):
                await self._service.wait_for_room(call.request.owner)
                return [LateGeneration(prepare)]
            return [await prepare()]

        return self._response(request, asked, call, None, await while_connected(request.receive, begin()))

    def _response(
        self,
        request: Request,
        asked: ChatBody | GenerateBody,
        call: ChatCall | CompletionCall,
        tools: ToolUse | None,
        generations: list[Generation],
    ) -> Response:
        state: Mapping[str, float] = request.scope["state"]
        meta = LineMeta(asked.model, isinstance(asked, ChatBody), tools, call, state["began"])
        if not asked.stream:
            return JsonAnswer(generations, AnswerObject(meta), self._keep_alive)
        return StreamedAnswer(generations, AnswerLines(meta), self._keep_alive, request_id.get())

    def _loaded(self, asked: ChatBody | GenerateBody) -> Response:
        """The answer to a request without a prompt: the model is there, and stays."""
        chat_model(self._service, model_name(asked.model))
        reason = "unload" if asked.keep_alive in (0, "0", "0s", "0m") else "load"
        meta = LineMeta(asked.model, isinstance(asked, ChatBody), None, _Silent(), 0.0)
        return answer(meta.line(meta.said("") | {"done": True, "done_reason": reason}))


class _Silent:
    report = False


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# `GET /api/tags`, `/api/ps` and `/api/version`, and `POST /api/show`: what Ollama's clients ask before they chat.


SPOKEN: Final = "0.13.0"  # the release of Ollama whose interface this is: clients refuse older ones
FAMILY: Final = "paceline"
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes of a weight
_FOREVER = "9999-12-31T23:59:59Z"  # so that no client loads a model again before it asks


class OllamaListing:
    """The routes, and the service they report on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = _now()  # a model's own age is not known

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="GET",
                path="/api/tags",
                endpoint=self.tags,
                summary="List the models that are served here, in Ollama's shape.",
                scope=None,
                response=ModelList,
                errors=SHAPE,
            ),
            Route(
                method="GET",
                path="/api/ps",
                endpoint=self.running,
                summary="List the models in memory, in Ollama's shape.",
                scope=None,
                response=ModelList,
                errors=SHAPE,
            ),
            Route(
                method="GET",
                path="/api/version",
                endpoint=self.version,
                summary="Name the release of Ollama whose interface this is.",
                scope=None,
                response=Release,
                errors=SHAPE,
            ),
            Route(
                method="POST",
                path="/api/show",
                endpoint=self.show,
                summary="Describe one model, in Ollama's shape.",
                scope=None,
                request=ShowBody,
                response=Shown,
                errors=SHAPE,
                refusals=(404,),
            ),
        )

    async def tags(self, request: Request) -> Response:  # noqa: ARG002  # an endpoint's signature
        known = served_models(self._service)
        return answer({"models": [_entry(name, model) | {"modified_at": self._began} for name, model in known]})

    async def running(self, request: Request) -> Response:  # noqa: ARG002
        def entry(name: str, model: ModelInfo | EmbedderInfo) -> dict[str, object]:
            more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": _length(model) or 0}
            return _entry(name, model) | more

        known = served_models(self._service)
        return answer({"models": [entry(name, model) for name, model in known if self._is_loaded(model)]})

    def _is_loaded(self, model: ModelInfo | EmbedderInfo) -> bool:
        return isinstance(model, EmbedderInfo) or self._service.model_status(model.name).state == "loaded"

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        return answer({"version": SPOKEN, "paceline": __version__})

    async def show(self, request: Request) -> Response:
        body = decode_object(await read_body(request.receive, request.headers.get("content-length")))
        asked = parse(ShowBody, body)
        name = asked.model or asked.name
        if name is None:
            raise RequestError("The field model is required.", param="model")
        model = any_model(self._service, model_name(name))
        return answer(
            {
                "modelfile": f"FROM {model.name}",
                "parameters": "",
                "template": "",  # the model's own, in Jinja, which Ollama does not use
                "details": _details(model),
                "model_info": _info(model),
                "capabilities": ["completion", "tools"] if isinstance(model, ModelInfo) else ["embedding"],
                "modified_at": self._began,
            }
        )


def _entry(name: str, model: ModelInfo | EmbedderInfo) -> dict[str, object]:
    size, digest = 0, ""
    if isinstance(model, ModelInfo):
        size, digest = model.num_weights * _WIDTHS.get(model.dtype, 0), model.fingerprint
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(model)}


def _details(model: ModelInfo | EmbedderInfo) -> Mapping[str, object]:
    weights = model.num_weights if isinstance(model, ModelInfo) else 0
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": FAMILY,
        "families": [FAMILY],
        "parameter_size": f"{weights / 1e9:.1f}B" if weights >= 10**9 else f"{weights / 1e6:.1f}M" if weights else "",
        "quantization_level": model.dtype if isinstance(model, ModelInfo) else "float32",
    }


def _info(model: ModelInfo | EmbedderInfo) -> Mapping[str, object]:
    info: dict[str, object] = {"general.architecture": FAMILY, "general.basename": model.name}
    if (length := _length(model)) is not None:
        info[f"{FAMILY}.context_length"] = length
    if isinstance(model, EmbedderInfo):
        return info | {f"{FAMILY}.embedding_length": model.dimensions}
    return info | {"general.parameter_count": model.num_weights, f"{FAMILY}.vocab_size": model.vocab_size}


def _length(model: ModelInfo | EmbedderInfo) -> int | None:
    return model.max_positions if isinstance(model, ModelInfo) else model.max_tokens
