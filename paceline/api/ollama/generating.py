"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.admit import admit_chat, read_chat
from paceline.api.chat.request import ChatCall, chat_call
from paceline.api.chat.tools import ToolUse
from paceline.api.completions.request import CompletionCall, completion_call
from paceline.api.generation.late import LateGeneration, must_load
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.http.auth import Identity
from paceline.api.http.body import while_connected
from paceline.api.http.pagination import answer
from paceline.api.http.validation import parse
from paceline.api.models import chat_model
from paceline.api.observation.request_id import request_id
from paceline.api.ollama.errors import SHAPE
from paceline.api.ollama.output import MEDIA_TYPE, AnswerLines, AnswerObject, LineMeta, loaded
from paceline.api.ollama.request import chat_body, check, model_name, raw_body
from paceline.api.ollama.schema import AnswerLine, ChatBody, GenerateBody
from paceline.api.routes import Route
from paceline.errors import RequestError
from paceline.runtime.service import Generation, Service


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
        check(body, asked)
        if not asked.messages:
            return self._loaded(asked)
        return await self._answered(request, asked)

    async def generate(self, request: Request) -> Response:
        body = await read_chat(request, self._service)
        asked = parse(GenerateBody, body)
        check(body, asked)
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
        meta = _meta(asked, tools, call, state["began"])
        if not asked.stream:
            return JsonAnswer(generations, AnswerObject(meta), self._keep_alive)
        return StreamedAnswer(generations, AnswerLines(meta), self._keep_alive, request_id.get())

    def _loaded(self, asked: ChatBody | GenerateBody) -> Response:
        """The answer to a request without a prompt: the model is there, and stays."""
        chat_model(self._service, model_name(asked.model))
        reason = "unload" if asked.keep_alive in (0, "0", "0s", "0m") else "load"
        return answer(loaded(_meta(asked, None, _Silent(), 0.0), reason))


class _Silent:
    report = False


def _meta(
    asked: ChatBody | GenerateBody,
    tools: ToolUse | None,
    call: ChatCall | CompletionCall | _Silent,
    began: float,
) -> LineMeta:
    return LineMeta(asked.model, isinstance(asked, ChatBody), tools, call, began, time.monotonic, _now)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
