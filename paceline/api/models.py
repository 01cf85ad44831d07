"""`/v1/models`, `/version`, `/healthz`, `/readyz`, `/health`, and the lookup of models by name.

Front ends fill their menus from the list; agents read the context length from `max_model_len` or `meta.n_ctx`. Chat
models and embedders share one list, since clients read only one. Each endpoint accepts its own kind only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.generation.schema import SWITCHES
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.errors import encode_json
from paceline.api.routes import Route
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import EmbedderInfo, Service
from paceline.workflow.flows import WORKFLOWS

EMBEDDER_PREFIX = "text-embedding-"


class Version(BaseModel):
    version: str


class Catalog:
    """The routes, and the service and admission control they report on."""

    def __init__(self, service: Service, admission: AdmissionControl) -> None:
        self._service = service
        self._admission = admission
        self._created = int(time.time())  # start of this process: a model's own age is not known

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="GET",
                path="/v1/models",
                endpoint=self.list_models,
                summary="List the models that are served here.",
                scope=None,
                response="SyncPage[Model]",
            ),
            Route(
                method="GET",
                path="/v1/models/{name:path}",
                endpoint=self.show_model,
                summary="Describe one model.",
                scope=None,
                response="Model",
            ),
            Route(
                method="GET",
                path="/healthz",
                endpoint=self.health,
                summary="Say that the process lives.",
                scope=None,
                open=True,
            ),
            Route(
                method="GET",
                path="/readyz",
                endpoint=self.ready,
                summary="Say whether it can be asked.",
                scope=None,
                open=True,
                refusals=(503,),
            ),
            Route(
                method="GET",
                path="/health",
                endpoint=self.ready,
                summary="Say whether it can be asked, where vLLM and llama.cpp do.",
                scope=None,
                open=True,
                refusals=(503,),
            ),
            Route(
                method="GET",
                path="/version",
                endpoint=self.version,
                summary="Name the release of this program.",
                scope=None,
                response=Version,
            ),
        )

    async def list_models(self, request: Request) -> Response:  # noqa: ARG002  # an endpoint's signature
        return _json(
            {"object": "list", "data": [self._entry(name, model) for name, model in served_models(self._service)]}
        )

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _json(self._entry(name, any_model(self._service, name)))

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        readiness = self._service.readiness()
        ready = readiness.ready and not self._admission.draining
        return _json({"ready": ready, "side": self._service.side, **readiness.detail}, 200 if ready else 503)

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        return _json({"version": __version__})

    def _entry(self, name: str, model: ModelInfo | EmbedderInfo) -> dict[str, object]:
        entry: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
        }
        return entry | (self._chat(model) if isinstance(model, ModelInfo) else self._embedding(model))

    def _chat(self, model: ModelInfo) -> dict[str, object]:
        status = self._service.model_status(model.name)
        return {
            "max_model_len": model.max_positions,
            "meta": {"n_ctx": model.max_positions, "n_vocab": model.vocab_size},
            "paceline": {
                "kind": "chat",
                "side": self._service.side,
                "state": status.state,  # loaded, loading or unloaded
                "joint": status.is_joint,  # it may write together with the other side
                "backend": model.backend or None,  # not known before it is loaded
                "dtype": model.dtype or None,  # likewise
                "strategies": list(self._service.strategies()),
                "workflows": list(
                    self._service.workflows()
                ),  # as `paceline.workflow`, or behind the name: `demo:research`
                # Defaults of a request's fields; a field that is absent here has OpenAI's default.
                "sampling": {name: value for name, value in asdict(model.sampling).items() if value is not None},
            },
        }

    def _embedding(self, model: EmbedderInfo) -> dict[str, object]:
        length: dict[str, object] = {} if model.max_tokens is None else {"max_model_len": model.max_tokens}
        return length | {
            "meta": {"n_embd": model.dimensions},
            "paceline": {"kind": "embedding", "side": self._service.side},
        }


def served_models(service: Service) -> Iterator[tuple[str, ModelInfo | EmbedderInfo]]:
    """Names of models. Chat models first: a client that takes the first name gets one that can chat. Then the same
    with a switch, and embedders, by both of their names: some front ends look the one that they are given up here."""
    models = service.models()
    switches = [name for name in SWITCHES if name not in WORKFLOWS or name in service.workflows()]
    yield from ((model.name, model) for model in models)
    yield from ((f"{model.name}:{switch}", model) for model in models for switch in switches)
    yield from ((name, embedder) for embedder in service.embedders() for name in _names(embedder))


def _json(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status_code=status, media_type="application/json")


def chat_model(service: Service, name: str) -> ModelInfo:
    """The model of this name, or of a name with a switch behind it. Raises RequestError 404 for an unknown name and
    for an embedder."""
    for model in service.models():
        if name == model.name or name in _with_switches(model):
            return model
    if any(name in _names(embedder) for embedder in service.embedders()):
        raise _missing(f"The model {name!r} makes embeddings and writes no text; ask /v1/embeddings.")
    raise _unknown(name, [model.name for model in service.models()])


def named_switch(service: Service, name: str) -> str | None:
    """The switch that a model's name ends with, as in `demo:plain`; None for a plain name."""
    found = (_with_switches(model).get(name) for model in service.models() if model.name != name)
    return next((switch for switch in found if switch is not None), None)


def _with_switches(model: ModelInfo) -> dict[str, str]:
    return {f"{model.name}:{switch}": switch for switch in SWITCHES}


def _names(embedder: EmbedderInfo) -> tuple[str, ...]:
    """The embedder's names. By the first, front ends that look for `embed` in a name leave it out of menus of chats."""
    own = embedder.name.rpartition("/")[2].lower()
    alias = own if "embed" in own else f"{EMBEDDER_PREFIX}{own}"
    return tuple(dict.fromkeys((alias, embedder.name)))


def embedder(service: Service, name: str) -> EmbedderInfo:
    """Raises RequestError 404 for an unknown name and for a chat model."""
    for found in service.embedders():
        if name in _names(found):
            return found
    if any(model.name == name for model in service.models()):
        raise _missing(f"The model {name!r} writes text and makes no embeddings.{_offer(service)}")
    raise _unknown(name, [found.name for found in service.embedders()])


def any_model(service: Service, name: str) -> ModelInfo | EmbedderInfo:
    """A model of either kind. Raises RequestError 404 for an unknown name."""
    for embedder in service.embedders():
        if name in _names(embedder):
            return embedder
    if any(name == model.name or name in _with_switches(model) for model in service.models()):
        return chat_model(service, name)
    raise _unknown(name, [*(model.name for model in service.models()), *(found.name for found in service.embedders())])


def _offer(service: Service) -> str:
    names = ", ".join(found.name for found in service.embedders())
    return f" Known embedders: {names}." if names else " None that does is here."


def _unknown(name: str, known: list[str]) -> RequestError:
    return _missing(f"The model {name!r} does not exist here. Known: {', '.join(known) or 'none'}.")


def _missing(sentence: str) -> RequestError:
    return RequestError(sentence, status=404, code="model_not_found", param="model")
