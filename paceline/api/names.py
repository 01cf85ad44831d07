"""Names of models: which of them an endpoint may be asked for, and the sentence for one it may not.

Chat models and embedders stand in one list, because clients know one list. Each endpoint takes its own kind only.
"""

from __future__ import annotations

from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import EmbedderInfo, Service


def chat_model(service: Service, name: str) -> ModelInfo:
    """Raises RequestError 404 for an unknown name and for an embedder."""
    for model in service.models():
        if model.name == name:
            return model
    if any(embedder.name == name for embedder in service.embedders()):
        raise _missing(f"The model {name!r} makes embeddings and writes no text; ask /v1/embeddings.")
    raise _unknown(name, [model.name for model in service.models()])


def embedder(service: Service, name: str) -> EmbedderInfo:
    """Raises RequestError 404 for an unknown name and for a chat model."""
    for found in service.embedders():
        if found.name == name:
            return found
    if any(model.name == name for model in service.models()):
        raise _missing(f"The model {name!r} writes text and makes no embeddings.{_offer(service)}")
    raise _unknown(name, [found.name for found in service.embedders()])


def any_model(service: Service, name: str) -> ModelInfo | EmbedderInfo:
    """Of either kind. Raises RequestError 404 for an unknown name."""
    known: tuple[ModelInfo | EmbedderInfo, ...] = (*service.models(), *service.embedders())
    for model in known:
        if model.name == name:
            return model
    raise _unknown(name, [model.name for model in known])


def _offer(service: Service) -> str:
    names = ", ".join(found.name for found in service.embedders())
    return f" Known embedders: {names}." if names else " None that does is here."


def _unknown(name: str, known: list[str]) -> RequestError:
    return _missing(f"The model {name!r} does not exist here. Known: {', '.join(known) or 'none'}.")


def _missing(sentence: str) -> RequestError:
    return RequestError(sentence, status=404, code="model_not_found", param="model")
