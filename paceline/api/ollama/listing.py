"""`GET /api/tags`, `/api/ps` and `/api/version`, and `POST /api/show`: what Ollama's clients ask before they chat."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.http.body import read_body
from paceline.api.http.pagination import answer
from paceline.api.http.strict_json import decode_object
from paceline.api.http.validation import parse
from paceline.api.models import any_model, served_models
from paceline.api.ollama.errors import SHAPE
from paceline.api.ollama.request import model_name
from paceline.api.ollama.schema import ModelList, Release, ShowBody, Shown
from paceline.api.routes import Route
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import EmbedderInfo, Service

SPOKEN: Final = "0.13.0"  # the release of Ollama whose interface this is: clients refuse older ones
FAMILY: Final = "paceline"
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes of a weight
_FOREVER = "9999-12-31T23:59:59Z"  # so that no client loads a model again before it asks


class OllamaListing:
    """The routes, and the service they report on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = datetime.now(UTC).isoformat().replace("+00:00", "Z")  # a model's own age is not known

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
