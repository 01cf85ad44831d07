"""`/v1/models`, and the lookup of models by name.

Front ends fill their menus from the list; agents read the context length from `max_model_len` or `meta.n_ctx`. Chat
models and embedders share one list, since clients read only one. Each endpoint accepts its own kind only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from starlette.responses import Response

from paceline.api.generation.schema import SamplingFields
from paceline.api.http.body import answer
from paceline.api.http.routing import ServiceDep
from paceline.api.openapi import answered, keyed_router
from paceline.core.side import MAX_NAME, is_name
from paceline.engine.base import ModelInfo
from paceline.errors import ConfigError, RequestError
from paceline.runtime.service import EmbedderInfo, Service
from paceline.workflow.flows import WORKFLOWS

Fields = TypeVar("Fields", bound=SamplingFields)
EMBEDDER_PREFIX = "text-embedding-"
# Switches behind the name of a model, as in `demo:plain`, which every program that has a menu of models can set: each
# sets a field of `paceline` to a value, and a request that sets it otherwise is refused.
SWITCHES: Mapping[str, tuple[str, object]] = {
    "plain": ("documents", 0),  # no document is read, on either side
    "local-only": ("privacy", "local-only"),
    **{workflow: ("workflow", workflow) for workflow in WORKFLOWS},
}


router = keyed_router("service")
_STARTED = int(time.time())  # this process: a model's own age is not known


@router.get("/v1/models", responses=answered("SyncPage[Model]"))
async def list_models(service: ServiceDep) -> Response:
    """List the models that are served here."""
    return answer({"object": "list", "data": [_entry(service, name, model) for name, model in served_models(service)]})


@router.get("/v1/models/{name:path}", responses=answered("Model"))
async def show_model(name: str, service: ServiceDep) -> Response:
    """Describe one model."""
    return answer(_entry(service, name, any_model(service, name)))


def _entry(service: Service, name: str, model: ModelInfo | EmbedderInfo) -> dict[str, object]:
    entry = {"id": name, "object": "model", "created": _STARTED, "owned_by": "paceline"}
    return entry | (_chat(service, model) if isinstance(model, ModelInfo) else _embedding(service, model))


def _chat(service: Service, model: ModelInfo) -> dict[str, object]:
    status = service.model_status(model.name)
    return {
        "max_model_len": model.max_positions,
        "meta": {"n_ctx": model.max_positions, "n_vocab": model.vocab_size},
        "paceline": {
            "kind": "chat",
            "side": service.side,
            "state": status.state,  # loaded, loading or unloaded
            "joint": status.is_joint,  # it may write together with the other side
            "tools": model.tools,  # format of its calls, by family
            "thinking": model.thinking is not None,  # before it answers, as `reasoning_content`
            "backend": model.backend or None,  # not known before it is loaded
            "dtype": model.dtype or None,  # likewise
            "exact": model.is_exact if model.backend else None,  # likewise; false: answers are reported as approximate
            "strategies": list(service.strategies()),
            "workflows": list(service.workflows()),  # as `paceline.workflow`, or behind the name: `demo:research`
            # Defaults of a request's fields; a field that is absent here has OpenAI's default.
            "sampling": {name: value for name, value in asdict(model.sampling).items() if value is not None},
        },
    }


def _embedding(service: Service, model: EmbedderInfo) -> dict[str, object]:
    length: dict[str, object] = {} if model.max_tokens is None else {"max_model_len": model.max_tokens}
    return length | {"meta": {"n_embd": model.dimensions}, "paceline": {"kind": "embedding", "side": service.side}}


def served_models(service: Service) -> Iterator[tuple[str, ModelInfo | EmbedderInfo]]:
    """Names of models. Chat models first: a client that takes the first name gets one that can chat. Then the same
    with a switch, aliases, and embedders, by both of their names: some front ends look the one that they are given up
    here."""
    models = service.models()
    switches = [name for name in SWITCHES if name not in WORKFLOWS or name in service.workflows()]
    yield from ((model.name, model) for model in models)
    yield from ((f"{model.name}:{switch}", model) for model in models for switch in switches)
    aliases = [(alias, any_model(service, alias)) for alias in service.aliases]
    yield from sorted(aliases, key=lambda alias: isinstance(alias[1], EmbedderInfo))
    yield from ((name, embedder) for embedder in service.embedders() for name in _names(embedder))


def chat_model(service: Service, name: str) -> ModelInfo:
    """The model of this name, or of a name with a switch behind it. Raises RequestError 404 for an unknown name and
    for an embedder."""
    found, _ = _lookup(service, name)
    if isinstance(found, ModelInfo):
        return found
    if found is not None:
        raise no_model(f"The model {found.name!r} makes embeddings and writes no text; ask /v1/embeddings.")
    raise _unknown(service, name, service.models())


def check_embedder(service: Service, name: str, dimensions: int | None = None) -> None:
    """Raises RequestError unless this is an embedder, with vectors of `dimensions` if that is given: 404 for an unknown
    name and for a chat model."""
    found, _ = _lookup(service, name)
    embedders = service.embedders()
    if found is None:
        raise _unknown(service, name, embedders)
    if isinstance(found, ModelInfo):
        known = ", ".join(each.name for each in embedders)
        offer = f"Known embedders: {known}." if known else "None that does is here."
        raise no_model(f"The model {name!r} writes text and makes no embeddings. {offer}")
    if dimensions not in (None, found.dimensions):
        raise RequestError(
            f"The vectors of {found.name} have {found.dimensions} dimensions and mean nothing when they are cut.",
            param="dimensions",
        )


def any_model(service: Service, name: str) -> ModelInfo | EmbedderInfo:
    """A model of either kind. Raises RequestError 404 for an unknown name."""
    found, _ = _lookup(service, name)
    if found is None:
        raise _unknown(service, name, [*service.models(), *service.embedders()])
    return found


def _lookup(service: Service, name: str) -> tuple[ModelInfo | EmbedderInfo | None, str]:
    """The model that a name or an alias means, if any, and the switch behind it; empty for none."""
    name = service.aliases.get(name, name)
    own, _, switch = name.rpartition(":")
    for model in service.models():
        if name == model.name:
            return model, ""
    for model in service.models():
        if own == model.name and switch in SWITCHES:
            return model, switch
    return next((embedder for embedder in service.embedders() if name in _names(embedder)), None), ""


def _unknown(service: Service, name: str, known: Sequence[ModelInfo | EmbedderInfo]) -> RequestError:
    aliases = (alias for alias in service.aliases if _lookup(service, alias)[0] in known)
    names = ", ".join([*(model.name for model in known), *aliases])
    return no_model(f"The model {name!r} does not exist here. Known: {names or 'none'}.")


def no_model(sentence: str) -> RequestError:
    return RequestError(sentence, status=404, code="model_not_found", param="model")


def switched(asked: Fields, name: str, service: Service) -> Fields:
    """The request with the switch that the name of its model ends with, if any. Raises RequestError (400) where it
    says otherwise itself."""
    if (switch := switch_of(name, service)) is None:
        return asked
    field, value = switch
    own = asked.paceline
    said = getattr(own, field) if field in own.model_fields_set else None
    if said not in (None, value):
        raise RequestError(
            f"The model's name asks for {field} {value!r}, and paceline.{field} for {said!r}.",
            param=f"paceline.{field}",
        )
    return asked.model_copy(update={"paceline": own.model_copy(update={field: value})})


def switch_of(name: str, service: Service) -> tuple[str, object] | None:
    """The field of `paceline` that the name of a model sets, and its value."""
    return SWITCHES.get(_lookup(service, name)[1])


def _names(embedder: EmbedderInfo) -> tuple[str, ...]:
    """The embedder's names. By the first, front ends that look for `embed` in a name leave it out of menus of chats."""
    own = embedder.name.rpartition("/")[2].lower()
    alias = own if "embed" in own else f"{EMBEDDER_PREFIX}{own}"
    return tuple(dict.fromkeys((alias, embedder.name)))


def read_aliases(service: Service, chat: Iterable[str], embedding: Iterable[str]) -> dict[str, str]:
    """The aliases that settings give as ALIAS=NAME, or as ALIAS for the first model of the kind. Raises ConfigError."""
    known = dict(served_models(service))
    aliases: dict[str, str] = {}
    for kind, given in ((ModelInfo, chat), (EmbedderInfo, embedding)):
        names = [name for name, model in known.items() if isinstance(model, kind)]
        for text in given:
            alias, _, wanted = text.partition("=")
            if not is_name(alias):
                raise ConfigError(f"{alias[:80]!r} cannot be an alias: use up to {MAX_NAME} printable characters.")
            if alias in known or alias in aliases:
                raise ConfigError(f"The alias {alias!r} is the name of a model already.")
            if not names or (wanted or names[0]) not in names:
                raise ConfigError(f"The alias {text!r} names no model of its kind. There are: {', '.join(names)}.")
            aliases[alias] = wanted or names[0]
    return aliases
