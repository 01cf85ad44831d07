"""Ollama's API, as a shape over chat completions, raw prompts and embeddings.

Requests become bodies of `/v1/chat/completions` and, for raw prompts, `/v1/completions`, which `chat_call` and
`completion_call` check and fill in; answers take Ollama's form. What is not done here is refused by name.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.chat.output import Choice, admit_chat, logprob_items, optional, summary
from paceline.api.chat.request import MAX_MESSAGES, ChatRequest, Tool, ToolUse, chat_call
from paceline.api.chat.tools import TextOutput, Thought, arguments_of
from paceline.api.completions import CompletionRequest, begin, completion_call
from paceline.api.generation.attachments import AnswerRoute
from paceline.api.generation.schema import (
    MAX_TOOLS,
    Extension,
    FormFields,
    JsonObject,
    Penalty,
    Probability,
    Stops,
    Temperature,
    required,
    unsupported,
)
from paceline.api.generation.streaming import SSE_HEADERS, AnswerWriter, sent
from paceline.api.http.auth import Identity
from paceline.api.http.body import Json, Schema, answer, encode_json, parse, while_connected
from paceline.api.http.errors import ErrorShape, Failure
from paceline.api.http.routing import Caller, LargeRoute, ServiceDep, Settings, SettingsDep
from paceline.api.models import any_model, chat_model, check_embedder, served_models
from paceline.api.observation import request_id
from paceline.api.openapi import answered, keyed_router
from paceline.api.texts import MAX_INPUTS
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import EmbedderInfo, Embeddings, GenerateEvent, GenerationResult, Service

# ---- bodies below `/api`, with Ollama's names -----------------------------------------------------------------------
# Unknown fields and options are ignored, as Ollama does. docs/api.md lists all fields. Source: docs/api.md of Ollama
# and the types of ollama-python 0.6.
OTHER_SAMPLERS = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}  # options with the value at which each has no effect

KeepAlive = float | str


class Options(Schema):
    """Those with an effect here. A `num_predict` of 0 or less means up to the context, a `seed` of -1 none."""

    num_predict: int | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class Function(Schema):
    name: str
    arguments: JsonObject = Field(default_factory=dict)


class ToolCall(Schema):
    function: Function


class Message(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] = Field(default_factory=list)  # refused where there are any
    tool_calls: list[ToolCall] = Field(default_factory=list)
    thinking: str | None = None  # before an earlier answer


class GenerationFields(FormFields):
    """Fields that `/api/chat` and `/api/generate` have in common."""

    refused: ClassVar = {
        "suffix": "Nothing can be written in front of a suffix here: the model only continues",
        "images": "This model reads text only",
        "template": "The model's own chat template is used; send a prompt with raw",
        "context": "Earlier answers are not kept as tokens; send the conversation to /api/chat",
    }
    model: str
    stream: bool = True
    format: Literal["", "json"] | JsonObject | None = None
    options: Options = Field(default_factory=Options)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    paceline: Extension = Field(default_factory=Extension)

    think: bool | str | None = None  # an effort as well; refused where the model does not think
    keep_alive: KeepAlive | None = None  # without effect: the model stays
    truncate: bool | None = None  # without effect: what is too long is refused
    shift: bool | None = None  # likewise

    @model_validator(mode="before")
    @classmethod
    def _without_other_samplers(cls, body: dict[str, object]) -> dict[str, object]:
        given = body.get("options")
        for name, without in OTHER_SAMPLERS.items():
            if isinstance(given, dict) and given.get(name) not in (None, without):
                raise unsupported(f"options.{name}", "Not supported: sample with temperature, top_k, top_p and min_p")
        return body


class ChatBody(GenerationFields):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)


class GenerateBody(GenerationFields):
    prompt: str = ""
    system: str | None = None
    raw: bool = False


class EmbedBody(Schema):
    model: str
    input: str | list[str]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool = True
    options: JsonObject | None = None  # without effect, and so is the next
    keep_alive: KeepAlive | None = None

    @model_validator(mode="after")
    def _is_cut(self) -> Self:
        if not self.truncate:
            raise unsupported(
                "truncate", "A text beyond the embedder's window is always cut; its length is in /v1/models"
            )
        return self


class EmbeddingsBody(Schema):
    """The body of `/api/embeddings`, the older way."""

    model: str
    prompt: str = ""
    options: JsonObject | None = None  # without effect, and so is the next
    keep_alive: KeepAlive | None = None


class ShowBody(Schema):
    model: str | None = None
    name: str | None = None  # the older name of `model`
    verbose: bool = False  # without effect


# ---- answers --------------------------------------------------------------------------------------------------------
class AnswerLine(BaseModel):
    """One line of a stream, or the whole answer. `error` alone, where it fails after its beginning."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    created_at: str | None = None
    done: bool | None = None
    error: str | None = None


class Embedded(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedOne(BaseModel):
    embedding: list[float]


class ModelDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(BaseModel):
    models: list[ModelEntry]


class Shown(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str


class Release(BaseModel):
    version: str
    paceline: str


def model_name(name: str) -> str:
    return name.removesuffix(":latest")


def chat_body(asked: ChatBody | GenerateBody) -> Json:
    body = _common(asked)
    if isinstance(asked, ChatBody):
        body["messages"] = [_message(message, index) for index, message in enumerate(asked.messages)]
        body["tools"] = [tool.model_dump(exclude_none=True) for tool in asked.tools]
    else:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        body["messages"] = [*system, {"role": "user", "content": asked.prompt}]
    if asked.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif asked.format:
        schema = {"name": "answer", "schema": asked.format}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(asked.think, bool):
        body["enable_thinking"] = asked.think
    elif asked.think:
        body["reasoning_effort"] = asked.think
    body |= {"max_tokens": _limit(asked.options), "logprobs": asked.logprobs}
    return asked.onto(body | ({"top_logprobs": asked.top_logprobs} if asked.logprobs else {}))


def _raw_body(asked: GenerateBody) -> Json:
    for name, value in (("format", asked.format), ("system", asked.system)):
        if value:
            raise unsupported(name, "It has no place in a raw prompt")
    limit = _limit(asked.options)
    body = _common(asked) | {"prompt": asked.prompt, "max_tokens": 2**31 - 1 if limit is None else limit}
    return asked.onto(body | ({"logprobs": asked.top_logprobs or 0} if asked.logprobs else {}))


def _common(asked: GenerationFields) -> Json:
    options = asked.options
    return {
        "model": model_name(asked.model),
        "stream": asked.stream,
        **options.model_dump(exclude={"num_predict", "repeat_penalty", "seed"}),
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "paceline": asked.paceline.model_dump(exclude_unset=True),
    }


def _limit(options: Options) -> int | None:
    return options.num_predict if options.num_predict is not None and options.num_predict > 0 else None


def _message(message: Message, index: int) -> Json:
    if message.images:
        raise unsupported(f"messages[{index}].images", "This model reads text only")
    functions = [
        {"name": call.function.name, "arguments": json.dumps(call.function.arguments, ensure_ascii=False)}
        for call in message.tool_calls
    ]
    calls = [{"type": "function", "function": function} for function in functions]
    said: Json = {"role": message.role, "content": message.content or "", "reasoning_content": message.thinking}
    return said | ({"tool_calls": calls} if calls else {})


class OllamaError(BaseModel):
    """Every answer below `/api` that reports an error."""

    error: str


def envelope(failure: Failure) -> Json:
    return {"error": failure.message}


SHAPE = ErrorShape("/api", OllamaError, envelope)


class LineWriter(AnswerWriter):
    """Lines of JSON (NDJSON), or all that they would say. Calls of tools come whole, before the last line: Ollama's
    arguments are an object. There are no citations, but in `paceline`, where a report is asked for."""

    headers: Mapping[str, str] = {**SSE_HEADERS, "content-type": "application/x-ndjson"}
    last = b""

    def __init__(self, asked: ChatBody | GenerateBody, tools: ToolUse | None, began: float) -> None:
        """began: s, monotonic."""
        self.id = request_id.get()
        self._model = asked.model  # as asked
        self._in_chat = isinstance(asked, ChatBody)
        self._report = asked.paceline.report
        self._began = began
        self._first: float | None = None  # s, when the first text came
        self._choice = Choice(tools)

    def framed(self, piece: Json) -> bytes:
        return encode_json(piece) + b"\n"

    def ping(self) -> bytes:
        return self.framed(self._line(""))

    def take(self, index: int, event: GenerateEvent) -> Sequence[Json]:  # noqa: ARG002  # there is one generation
        said = self._choice.take(event)
        text = "".join(part.text for part in said if isinstance(part, TextOutput))
        if isinstance(event, GenerationResult):
            calls = self._calls()
            lines = [self._line(text)] if text else []
            lines += [self._line("", tool_calls=calls)] if calls else []
            return [*lines, self._line("") | self._ending(event)]
        if event.step is None:
            self._first = self._first or time.monotonic()
        thought = "".join(part.text for part in said if isinstance(part, Thought))
        logprobs: Json = {"logprobs": logprob_items(event)} if event.logprobs else {}
        if not (text or thought or logprobs):
            return ()
        return [self._line(text, **({"thinking": thought} if thought else {})) | logprobs]

    def whole(self) -> Json:
        choice, message = self._choice, self._choice.message()
        assert choice.done is not None, "an answer is written when it has ended"
        more = {"thinking": message.get("reasoning_content"), "tool_calls": self._calls()}
        said = self._line(str(message["content"] or ""), **{name: value for name, value in more.items() if value})
        return said | self._ending(choice.done) | ({"logprobs": choice.logprobs} if choice.logprobs else {})

    def ended(self, reason: str) -> Json:
        """The answer to a request without a prompt."""
        return self._line("") | {"done": True, "done_reason": reason}

    def _line(self, text: str, **more: object) -> Json:
        said: Json = (
            {"message": {"role": "assistant", "content": text, **more}} if self._in_chat else {"response": text, **more}
        )
        return {"model": self._model, "created_at": _now(), "done": False, **said}

    def _calls(self) -> list[Json]:
        message: Mapping[str, Any] = self._choice.message()
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return [{"function": {"name": one["name"], "arguments": arguments_of(one["arguments"])}} for one in functions]

    def _ending(self, done: GenerationResult) -> Json:
        end = time.monotonic()
        first = self._first or end
        return {
            "done": True,
            "done_reason": done.reason,
            "total_duration": _ns(end - self._began),
            "load_duration": 0,
            "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": _ns(first - self._began),
            "eval_count": done.completion_tokens,
            "eval_duration": _ns(end - first),
        } | optional("paceline", summary(self._report, [done]))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# ---- POST /api/chat and POST /api/generate ---------------------------------------------------------------------------
answers = keyed_router("ollama", "chat", prefix="/api", route=AnswerRoute, error=OllamaError)
_LINES = answered(AnswerLine, lines=True)


@answers.post("/chat", responses=_LINES)
async def chat(
    asked: ChatBody, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Answer a conversation, in Ollama's shape."""
    if not asked.messages:
        return _loaded(asked, service)
    return await _answer(asked, request, service, settings, caller)


@answers.post("/generate", responses=_LINES)
async def generate(
    asked: GenerateBody, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Answer one question, or continue a raw text, in Ollama's shape."""
    if not asked.prompt:
        return _loaded(asked, service)
    if asked.raw:
        return await _continue(asked, request, service, caller)
    return await _answer(asked, request, service, settings, caller)


async def _answer(
    asked: ChatBody | GenerateBody, request: Request, service: Service, settings: Settings, caller: Identity
) -> Response:
    if asked.think and chat_model(service, model_name(asked.model)).thinking is None:
        raise RequestError(f"{asked.model!r} does not support thinking.", code="unsupported_parameter", param="think")
    call = chat_call(parse(ChatRequest, chat_body(asked)), service, caller, documents=settings.documents)
    generations = await admit_chat(request, call, service)
    writer = LineWriter(asked, call.tools, request.state.began)
    return sent(generations, writer, stream=asked.stream)


async def _continue(asked: GenerateBody, request: Request, service: Service, caller: Identity) -> Response:
    if not caller.may("completions"):
        raise RequestError(
            "This key may not continue raw prompts: it needs the scope 'completions'.",
            status=403,
            code="insufficient_scope",
            param="raw",
        )
    call = completion_call(parse(CompletionRequest, _raw_body(asked)), service, caller)
    request.state.model = call.model.name  # for the log
    _, generations = await while_connected(request.receive, begin(service, call))
    writer = LineWriter(asked, None, request.state.began)
    return sent(generations, writer, stream=asked.stream)


def _loaded(asked: ChatBody | GenerateBody, service: Service) -> Response:
    """The answer to a request without a prompt, with which clients load a model, and unload it: it is there, and
    stays."""
    chat_model(service, model_name(asked.model))
    reason = "unload" if asked.keep_alive in (0, "0", "0s", "0m") else "load"
    return answer(LineWriter(asked, None, 0.0).ended(reason))


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# ---- POST /api/embed, and the older POST /api/embeddings -------------------------------------------------------------
vectors = keyed_router("ollama", "embeddings", prefix="/api", route=LargeRoute, error=OllamaError)


@vectors.post("/embed", responses=answered(Embedded))
async def embed(asked: EmbedBody, request: Request, service: ServiceDep) -> Response:
    """Turn texts into vectors, in Ollama's shape. Texts beyond the embedder's window are cut to it."""
    began = time.monotonic()
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    if len(texts) > MAX_INPUTS:
        raise RequestError(f"input holds {len(texts)} texts; at most {MAX_INPUTS} at once.", param="input")
    found = await _vectors(asked.model, asked.dimensions, [text for text in texts if text], request, service)
    if len(found.vectors) < len(texts) and texts != [""]:
        raise RequestError("input holds an empty string: there is nothing to embed.", param="input")
    body = {
        "model": asked.model,
        "embeddings": found.vectors.tolist(),
        "total_duration": _ns(time.monotonic() - began),
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }
    return await asyncio.to_thread(answer, body)


@vectors.post("/embeddings", responses=answered(EmbeddedOne))
async def embed_one(asked: EmbeddingsBody, request: Request, service: ServiceDep) -> Response:
    """Turn one text into a vector, in Ollama's older shape."""
    found = await _vectors(asked.model, None, [asked.prompt] if asked.prompt else [], request, service)
    return answer({"embedding": found.vectors[0].tolist() if len(found.vectors) else []})


async def _vectors(
    model: str, dimensions: int | None, texts: list[str], request: Request, service: Service
) -> Embeddings:
    """None without texts, with which clients load a model."""
    check_embedder(service, model_name(model), dimensions)
    return await while_connected(request.receive, service.embed(texts, request.state.identity.key))


# ---- what Ollama's clients ask before they chat ----------------------------------------------------------------------
SPOKEN: Final = "0.13.0"  # the release of Ollama whose interface this is: clients refuse older ones
FAMILY: Final = "paceline"
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes of a weight
_FOREVER = "9999-12-31T23:59:59Z"  # so that no client loads a model again before it asks
_STARTED = _now()  # this process: a model's own age is not known

listing = keyed_router("ollama", prefix="/api", error=OllamaError)


@listing.get("/tags", responses=answered(ModelList))
async def list_models(service: ServiceDep) -> Response:
    """List the models that are served here, in Ollama's shape."""
    return answer(
        {"models": [_entry(name, model) | {"modified_at": _STARTED} for name, model in served_models(service)]}
    )


@listing.get("/ps", responses=answered(ModelList))
async def list_running(service: ServiceDep) -> Response:
    """List the models in memory, in Ollama's shape."""
    running = [
        _entry(name, model) | {"expires_at": _FOREVER, "size_vram": 0, "context_length": _length(model) or 0}
        for name, model in served_models(service)
        if isinstance(model, EmbedderInfo) or service.model_status(model.name).state == "loaded"
    ]
    return answer({"models": running})


@listing.get("/version")
async def show_version() -> Release:
    """Name the release of Ollama whose interface this is."""
    return Release(version=SPOKEN, paceline=__version__)


def _capabilities(model: ModelInfo | EmbedderInfo) -> list[str]:
    if isinstance(model, EmbedderInfo):
        return ["embedding"]
    return ["completion", "tools", *([] if model.thinking is None else ["thinking"])]


@listing.post("/show", responses=answered(Shown))
async def show_model(asked: ShowBody, service: ServiceDep) -> Response:
    """Describe one model, in Ollama's shape."""
    name = asked.model or asked.name
    if name is None:
        raise required("model")
    model = any_model(service, model_name(name))
    return answer(
        {
            "modelfile": f"FROM {model.name}",
            "parameters": "",
            "template": "",  # the model's own, in Jinja, which Ollama does not use
            "details": _details(model),
            "model_info": _info(model),
            "capabilities": _capabilities(model),
            "modified_at": _STARTED,
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
