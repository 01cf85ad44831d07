"""Common request fields to a `GenerateRequest`, and the answer's form to a `Constraint`.

Defaults are filled in, and each choice has a seed. Knows what the service can do (models, strategies, vocabulary). At
the end, the admission of a call's requests.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

from pydantic import Field

from paceline.api.generation.schema import (
    Extension,
    FormFields,
    GrammarFormat,
    JsonFormat,
    JsonObject,
    RegexFormat,
    SamplingFields,
    SchemaFormat,
    SchemaText,
    TypedGrammar,
)
from paceline.api.http.auth import Identity
from paceline.api.http.body import decode_object
from paceline.api.observation import request_id
from paceline.core.sampling.sampler import (
    Constraint,
    ConstraintKind,
    SamplingParams,
    usable_temperature,
)
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import (
    AUTO,
    Account,
    AskedPrompt,
    GenerateEvent,
    GenerateRequest,
    Generation,
    Joining,
    OutputForm,
    Service,
    Sources,
)
from paceline.strategies.base import Wish
from paceline.strategies.registry import debug_options

MAX_SCHEMAS = 65_536  # characters: of the form of an answer, and of all tools' schemas together
MAX_DEPTH = 64  # of one schema, which is compiled recursively
FORMED_TOKENS = 4096  # of an answer that must keep to a form, where neither the request nor a setting has a limit


def generation_of(
    asked: SamplingFields,
    model: ModelInfo,
    service: Service,
    identity: Identity,
    prompt: AskedPrompt,
    *,
    documents: int,
    limit: int | None,
    form: Constraint | None,
    is_free: bool = False,
    top_logprobs: int | None,
    thinking_tokens: int | None = None,
) -> GenerateRequest:
    """The request of one generation that the common fields describe.

    `documents`: passages per side where the request sets none. `limit`: maximum of tokens; None: up to the context.
    `form`: of the answer, or of what it may be instead of free text where `is_free`.
    """
    extension = asked.paceline
    _check_ends(asked, model, limit)
    return GenerateRequest(
        prompt,
        Wish(
            strategy_of(extension.strategy, service.strategies()),
            sampling_of(asked, model),
            extension.privacy,
            options_of(extension, service),
            documents if extension.documents is None else extension.documents,
            top_logprobs,
            seeded=asked.seed is not None,
        ),
        OutputForm(
            max_tokens=None if limit is None else min(limit, model.max_positions),
            default_tokens=None if form is None or is_free else FORMED_TOKENS,
            stop=tuple(asked.stop),
            stop_token_ids=tuple(asked.stop_token_ids),
            constraint=ended(form, asked),
            thinking_tokens=thinking_tokens,
            timeline=extension.timeline and extension.report,
        ),
        Sources(workflow=extension.workflow, steps=extension.steps),
        Joining(
            on_loss=extension.on_device_loss,
            device=device_of(extension.device, service, identity),
            names_device=extension.device is not None,
            handoff=extension.handoff,
            any_device=not identity.key,
        ),
        Account(owner=identity.key, asker=identity.name, trace=request_id.get()),
        model.name,
    )


def options_of(extension: Extension, service: Service) -> dict[str, object]:
    """Options of strategies that the request asks for, by field. Raises RequestError (400) where `debug` is not known
    or not accepted."""
    options: dict[str, object] = {"search_every": extension.search_every or 0}
    if extension.unanswered == "write":
        options["unanswered"] = "write"
    if extension.reading is not None:
        options["reading"] = extension.reading
    if extension.energy is not None:
        options |= extension.energy.model_dump(exclude_none=True)
    if extension.debug is None:
        return options
    if not service.debug_options:
        raise RequestError(
            "paceline.debug chooses forms of strategies for measurements. This server was started without "
            "--debug-options and does not accept it.",
            param="paceline.debug",
        )
    return options | debug_options(extension.debug, extension.strategy or AUTO)


def sampling_of(asked: SamplingFields, model: ModelInfo) -> SamplingParams:
    """Sampling parameters of the request, then of this side's settings, then of the model's recommendation.

    Without a seed one is drawn.
    """
    chosen = {
        name: default if (said := getattr(asked, name)) is None else said
        for name, default in asdict(model.sampling).items()
    }
    if chosen["temperature"] is not None:
        chosen["temperature"] = usable_temperature(chosen["temperature"])
    if chosen["top_k"] is not None:
        chosen["top_k"] = max(chosen["top_k"], 0)  # front ends say -1 for no limit
    return SamplingParams(
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=biases_of(asked.logit_bias, model.vocab_size),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        **{name: value for name, value in chosen.items() if value is not None},
    )


# ---- the form of an answer ------------------------------------------------------------------------------------------
def form_of(asked: FormFields) -> Constraint | None:
    """The constraint that the request's fields ask for; None for free text. Raises RequestError (400) where there are
    two, or one is too large."""
    found = list(_forms(asked))
    if len(found) > 1:
        raise RequestError(
            f"{found[0].param} and {found[1].param} both ask for a form of the answer: one of them may be given.",
            param=found[1].param,
        )
    if found and len(found[0].text) > MAX_SCHEMAS:
        raise RequestError(f"{found[0].param} takes more than {MAX_SCHEMAS} characters.", param=found[0].param)
    return found[0] if found else None


def ended(form: Constraint | None, asked: FormFields) -> Constraint | None:
    """The form, and what the request says of where the answer may end."""
    if not (asked.min_tokens or asked.ignore_eos):
        return form
    return replace(
        Constraint("text") if form is None else form,
        min_tokens=asked.min_tokens,
        ignore_eos=asked.ignore_eos,
        stop_ids=tuple(sorted(set(asked.stop_token_ids))) if asked.min_tokens else (),
    )


_FORMS = ("guided_json", "json_schema", "guided_regex", "regex", "guided_choice", "guided_grammar", "grammar", "ebnf")


def _forms(asked: FormFields) -> Iterator[Constraint]:
    match asked.response_format:
        case JsonFormat(schema_=dict(given)):
            yield _schema(given, "response_format.schema")
        case JsonFormat():
            yield Constraint("json_object")
        case SchemaFormat(json_schema=named):
            kind: ConstraintKind = "json_schema" if named.strict else "loose_schema"
            yield _schema(named.schema_, "response_format.json_schema.schema", kind)
        case RegexFormat(pattern=pattern):
            yield Constraint("regex", pattern, param="response_format")
        case GrammarFormat(grammar=grammar):
            yield Constraint("grammar", grammar, param="response_format")
    fields: dict[str, SchemaText | TypedGrammar | list[str] | bool | None] = {
        name: getattr(asked, name) for name in _FORMS
    }
    if (outputs := asked.structured_outputs) is not None:
        fields |= {f"structured_outputs.{name}": value for name, value in outputs.model_dump(by_alias=True).items()}
    for param, value in fields.items():
        match param.removeprefix("structured_outputs.").removeprefix("guided_"), value:
            case _, None | "" | False | []:
                pass
            case "json" | "json_schema", dict() | str():
                yield _schema(value, param)
            case "json_object", True:
                yield Constraint("json_object", param=param)
            case "regex", str():
                yield Constraint("regex", value, param=param)
            case "choice", list():
                yield Constraint("choice", json.dumps(value, ensure_ascii=False), param=param)
            case "grammar" | "ebnf", str():
                yield Constraint("grammar", value, param=param)
            case "grammar", TypedGrammar(type="regex", value=str(pattern)) if pattern:
                yield Constraint("regex", pattern, param=param)
            case "grammar", TypedGrammar(type="json"):
                yield _schema(value.value, param)
            case "grammar", TypedGrammar():
                raise RequestError("The value of grammar must be a pattern where its type is regex.", param=param)


def _schema(schema: SchemaText, param: str, kind: ConstraintKind = "json_schema") -> Constraint:
    """schema: also as text, as vLLM takes it."""
    if isinstance(schema, str):
        try:
            schema = decode_object(schema.encode())
        except RequestError:
            raise RequestError(f"{param} must be a JSON schema, an object or the text of one.", param=param) from None
    if size_of_schema(schema, param) > MAX_SCHEMAS:
        raise RequestError(f"The schema takes more than {MAX_SCHEMAS} characters.", param=param)
    field = "response_format" if param.startswith("response_format") else param
    return Constraint(kind, json.dumps(schema, ensure_ascii=False), param=field)


def size_of_schema(schema: JsonObject, param: str) -> int:
    """Characters of a schema's JSON. Raises RequestError (400) if it is nested too deeply."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return len(json.dumps(schema, ensure_ascii=False))
    raise RequestError(f"It is nested more than {MAX_DEPTH} levels deep.", param=param)


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _check_ends(asked: FormFields, model: ModelInfo, limit: int | None) -> None:
    if limit is not None and asked.min_tokens > limit:
        raise RequestError(
            f"min_tokens is {asked.min_tokens}, more than the {limit} tokens that the answer may have.",
            param="min_tokens",
        )
    for token in asked.stop_token_ids:
        if token >= model.vocab_size:
            raise RequestError(
                f"stop_token_ids has {token}; token ids are from 0 to {model.vocab_size - 1}.", param="stop_token_ids"
            )


def check_relations(asked: SamplingFields) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")


def biases_of(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in biases.items():
        token = int(key[:12]) if key.isascii() and key.isdigit() else -1
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias has the key {key[:32]!r}; keys are token ids from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        result[token] = bias
    return result


def strategy_of(name: str | None, known: Sequence[str]) -> str:
    choices = list(dict.fromkeys([AUTO, *known]))
    if name is None or name in choices:
        return name or AUTO
    near = difflib.get_close_matches(name[:64], choices, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise RequestError(f"Unknown strategy {name[:64]!r}; known: {', '.join(choices)}.{hint}", param="paceline.strategy")


def device_of(name: str | None, service: Service, identity: Identity) -> str | None:
    if service.side == "device":
        if name is not None:
            raise RequestError("A device is named at the server; this is the device itself.", param="paceline.device")
        return None
    if identity.device is not None and name not in (None, identity.device):
        raise RequestError(
            "This key is bound to another device.", status=403, code="device_not_allowed", param="paceline.device"
        )
    if name is not None and identity.device is None and not identity.may("devices"):
        raise RequestError(
            "This key may not name a device: it needs the scope 'devices', or to be bound to one.",
            status=403,
            code="device_not_allowed",
            param="paceline.device",
        )
    return identity.device or name


def choices_of(request: GenerateRequest, count: int) -> tuple[GenerateRequest, ...]:
    """Requests of `count` choices, each of which can be requested again alone by its seed."""
    return tuple(replace(request, wish=request.wish.nth(index)) for index in range(count))


# ---- input texts of OpenAI's older endpoints: one or several, each as a string or as token ids -----------------------
# Parsed by hand, since a schema of four alternatives can only report that none of them fits.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Inputs = str | Annotated[list[str], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
"""Type of the field in a request schema."""

Input = str | tuple[int, ...]


def inputs(param: str, most: int) -> Callable[[object], tuple[Input, ...]]:
    """A validator that reads up to `most` inputs. It raises RequestError (400) that names the element at fault."""
    return partial(_inputs, param=param, most=most)


def _inputs(value: object, *, param: str, most: int) -> tuple[Input, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _wrong(param, "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise _wrong(param, "is an empty list")
    if _is_token(value[0]):
        return (_tokens(value, param),)
    if len(value) > most:
        raise _wrong(param, f"holds {len(value)} texts; at most {most} at once")
    return tuple(_one(item, f"{param}[{index}]", value[0]) for index, item in enumerate(value))


def _one(item: object, where: str, first: object) -> Input:
    if isinstance(item, str) and isinstance(first, str):
        return item
    if isinstance(item, list) and isinstance(first, list):
        return _tokens(item, where)
    kind = "a string" if isinstance(first, str) else "a list of token ids"
    raise _wrong(where, f"must be {kind}" + (", like the first" if item is not first else ""))


def _tokens(value: list[object], where: str) -> tuple[int, ...]:
    if not value:
        raise _wrong(where, "is an empty list")
    for index, token in enumerate(value):
        if not _is_token(token):
            raise _wrong(f"{where}[{index}]", "must be a token id, a whole number from 0 on")
    return tuple(token for token in value if isinstance(token, int))


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _wrong(where: str, fault: str) -> RequestError:
    return RequestError(f"{where} {fault}.", param=where)


# ---- admission ------------------------------------------------------------------------------------------------------
def must_load(service: Service, model: str) -> bool:
    """True if an answer of this model, by its served name, waits for the model to be loaded."""
    return service.model_status(model).state != "loaded"


class LateGeneration:
    """A `Generation` that begins with its admission, so that a stream is not silent while its model is loaded. What
    would refuse the request then ends its stream, if that takes more than `streaming.HEADERS_WAIT_S`."""

    prompt_tokens = 0  # not known yet

    def __init__(self, prepare: Callable[[], Awaitable[Generation]]) -> None:
        """prepare: as `Service.prepare`."""
        self._prepare = prepare

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        generation = await self._prepare()
        async with aclosing(generation.run()) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        """Nothing has begun."""


async def prepare_all(
    service: Service,
    requests: Sequence[GenerateRequest],
    prepare: Callable[[GenerateRequest], Awaitable[Generation]] | None = None,
) -> list[Generation]:
    """Admit all requests of one model, or none. prepare: as `Service.prepare`, which is the default. Raises what it
    raises.

    Where the model has to be loaded first, each is admitted when it is run, and may be refused then.
    """
    prepare = prepare or service.prepare
    if must_load(service, requests[0].model):
        return [LateGeneration(partial(prepare, request)) for request in requests]
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(await prepare(request))
    except BaseException:  # also a cancellation: the client may leave while others are admitted
        await close_all(generations)
        raise
    return generations


async def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        await generation.aclose()
