"""Start-up of both programs: opens the models and stores that the settings name, and serves a node on them.

The server and the agent pass in what differs: keys, links, and the task that runs beside their HTTP server. Knows
nothing of devices, enrolment or credentials.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from fastapi import FastAPI

from paceline.api.app import create_app
from paceline.api.http.admission import DoorLimits, networks
from paceline.api.http.auth import Keyring
from paceline.api.http.routing import Addresses, Settings
from paceline.api.http.server import can_tell, serve, url_of
from paceline.api.models import read_aliases
from paceline.api.responses.begun import Continuing
from paceline.api.responses.log import Retention
from paceline.core.offloading import Unit
from paceline.core.policy import Policy
from paceline.core.redaction import combined, find_entities
from paceline.engine.base import AsyncEngine, Engine, LoadedModel, ModelInfo, ServedModel
from paceline.engine.loader import choose_device, gpu_uuid
from paceline.engine.reader.engine import is_reader, load_pointer
from paceline.errors import ConfigError
from paceline.model_opening import (
    device_of,
    further_models,
    opened_model,
    sampling_of,
    served_name,
    step_rows,
    workflow_units,
)
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import MiniLMEmbedder, load_embedder
from paceline.rag.entities import load_entity_model
from paceline.rag.prompt import RELEVANCE_TEMPERATURE
from paceline.rag.rerank import Reranker, load_reranker
from paceline.rag.store.documents import DocumentStore
from paceline.rag.web import SearxngSearch
from paceline.runtime.asking import CloudAsks
from paceline.runtime.endpoint import OutsideEndpoint
from paceline.runtime.energy import ChosenMeter, SideEnergy, choose_meter
from paceline.runtime.lookup_tables import FOLDER as TABLES
from paceline.runtime.lookup_tables import TableStore
from paceline.runtime.node import Node
from paceline.runtime.policy import PolicyGuard
from paceline.runtime.questions import Judge
from paceline.runtime.resources import Company, Computing, Kept, NodeParts, Offer
from paceline.runtime.served_models import ServedModels
from paceline.runtime.sessions.handoff import Outcomes
from paceline.runtime.stimuli import FILE as STIMULI
from paceline.runtime.stimuli import StimulusLog
from paceline.runtime.tracing import Tracer, tracer_of
from paceline.runtime.workflows.run import Tools
from paceline.runtime.workflows.web import WebAccess, WebLimits
from paceline.sealing import Seal, open_answers_seal
from paceline.secret_files import STDIN, private_folder, secret_lines
from paceline.settings import STORE, AgentSettings, NodeSettings, ServerSettings
from paceline.sql import Home
from paceline.strategies.registry import STRATEGIES
from paceline.system import Threads
from paceline.wire.messages import Introduction

_log = logging.getLogger("paceline")

Background = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """A running node and the model it runs, which is the one that joins a link."""

    node: Node
    service: ServedModels  # over it and the further models
    model: ServedModel
    name: str  # the model's name for clients
    seal: Seal  # of stored responses and look-up tables
    tracer: Tracer | None  # that the environment asks for
    database: Home | None  # where responses and documents are kept; None: the state directory

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid on the link: both the engine and the tokenizer have them."""
        return min(self.model.engine.info.vocab_size, self.model.tokenizer.vocab_size)

    def app(self, settings: NodeSettings, keyring: Keyring, *, cloud: str = "") -> FastAPI:
        """The HTTP API over it. cloud: address of the other side, see `Addresses`."""
        tuning = settings.tuning
        app = create_app(
            self.service,
            Settings(
                settings.answers.documents,
                addresses=Addresses(settings.public_url or "", cloud),
                longest_silent=tuning.longest_silent_answer,
            ),
            keyring=keyring,
            state=self.database or settings.state_dir,
            retention=Retention(tuning.responses_mib << 20, tuning.responses_days * 86_400),
            limits=door_limits(settings),
            seal=self.seal,
            tracer=self.tracer,
        )
        app.state.continuing = Continuing(app)
        return app

    def introduction(self) -> Introduction:
        """This side as it describes itself on a link, with the number of documents at this moment."""
        return Introduction(
            tokenizer=self.model.tokenizer.fingerprint,
            model=self.model.engine.info.fingerprint,
            model_name=self.name,
            strategies=list(STRATEGIES),
            documents=self.node.num_documents,
            num_weights=self.model.engine.info.num_weights,
            relevance=self.node.relevance,
        )


async def run_node(
    settings: NodeSettings,
    listener: socket.socket,
    shipped: Mapping[str, Path],
    compose: Callable[[OpenedNode], Awaitable[tuple[FastAPI, Background | None]]],
    *,
    expects_peer: Callable[[], bool] = bool,
    asks: CloudAsks | None = None,
    open_engine: Callable[[Path, str], AbstractContextManager[AsyncEngine]] | None = None,
    open_draft: Callable[[ServedModel], Engine] | None = None,
    database: Home | None = None,
    names: Callable[[str], str] = str,
) -> None:
    """Open store, model and node, serve on `listener` until a signal, then close them in reverse order.

    `compose` returns the application and the task to run beside it, which is cancelled once the server has drained.
    `shipped`: see `open_model`; `expects_peer`, `asks`: see `Company`. `open_engine`: of a model's directory and name,
    in place of loading its engine here. `open_draft`: the draft model's engine beside this model. `database`: where
    responses and documents are kept, instead of folders. `names`: see `PolicyGuard`. The caller closes `listener`.

    Raises ConfigError for a model, documents or a state directory that cannot be used, EngineLost after the engine's
    device has failed for good.
    """
    asyncio.get_running_loop().set_default_executor(Threads(None, "asyncio"))
    with open_store(settings, database) as store, opened_model(settings, shipped, open_engine) as model:
        seal = open_answers_seal(settings.state_dir, encrypt=settings.encrypt_documents)
        name = served_name(settings, model)
        tracer = tracer_of(settings.side)
        reranker = open_reranker(settings, store)
        answers = settings.answers
        offer = Offer(name, sampling_of(settings), answers.system or "", answers.max_tokens_default)
        computing = Computing(
            step_rows(settings, model.engine.info),
            timed=True,
            draft_engine=None if open_draft is None else open_draft(model),
            units=workflow_units(settings),
            energy=open_energy(settings, model),
            stimuli=open_stimuli(settings),
        )
        temperature = RELEVANCE_TEMPERATURE  # a device follows its clouds
        if isinstance(settings, ServerSettings):
            temperature = settings.tuning.relevance_temperature
        judge = next((Judge(partial(load_pointer, folder)) for folder in shipped.values() if is_reader(folder)), None)
        outcomes = Outcomes(settings.state_dir) if settings.side == "device" else None
        text = model.tokenizer
        tables = TableStore(settings.state_dir / TABLES, text.fingerprint, text.vocab_size, seal=seal)
        kept = Kept(open_kv(settings, store), tables, temperature, judge, outcomes)
        guard = PolicyGuard(settings.side, settings.policy.policy(), database or settings.state_dir, names)
        outside = open_outside(settings)
        terms = Company(expects_peer, asks=asks, cloud_texts=False, tracer=tracer, policy=guard, outside=outside)
        if isinstance(settings, AgentSettings):
            shares, texts, handoff = settings.share_distributions, settings.tuning.cloud_texts, settings.handoff
            terms = replace(terms, open_to_peer=shares, cloud_texts=texts, handoff=handoff)
        tools = Tools(reranker, open_web(settings), settings.tuning.long_passages)
        node = Node(settings.side, model, store, NodeParts(offer, computing, kept, terms), tools)

        def further(loaded: LoadedModel, its_name: str) -> Node:
            """A node on the first one's documents. What it learns is forgotten with it."""
            joins = loaded.tokenizer.fingerprint == model.tokenizer.fingerprint
            energy = SideEnergy(energy_meter(settings, loaded.engine.info).meter, settings.energy.send_watts)
            parts = NodeParts(
                replace(offer, name=its_name),
                replace(computing, draft_engine=None, units=workflow_units(settings), energy=energy),
                Kept(judge=judge),
                replace(terms, open_to_peer=False, asks=None, cloud_texts=False),
            )
            tools = Tools(reranker, open_web(settings), settings.tuning.long_passages)
            return Node(settings.side, loaded, store, parts, tools, first=node, alone=None if joins else apart)

        def apart() -> str:
            """Why a model with another tokenizer is not joined, if there is anybody to join."""
            is_anybody = expects_peer() or bool(node.links())
            return f"its model has another tokenizer than this one; {name} writes with it" if is_anybody else ""

        def ready() -> None:
            others = f" and {len(settings.model) - 1} more" if len(settings.model) > 1 else ""
            doubt = f"; approximate: {model.engine.info.doubt}" if model.engine.info.doubt else ""
            documents = f"{node.num_documents} documents"
            with suppress(OSError):  # output that goes nowhere, as to a full disk, does not end what serves
                typer.echo(f"paceline: serving {name}{others} on {url_of(listener)} ({documents}{doubt})")

        async with (
            node,
            ServedModels(
                node, further_models(settings, shipped, model, further), debug_options=settings.debug_options
            ) as service,
        ):
            service.aliases = read_aliases(service, settings.model_alias, settings.embedding_alias)
            check_models(guard.policy, [model.name for model in service.models()])
            app, background = await compose(OpenedNode(node, service, model, name, seal, tracer, database))
            async with asyncio.TaskGroup() as tasks:
                beside = None if background is None else tasks.create_task(background())
                await serve(app, listener, on_ready=ready, until=service.until_lost)
                if beside is not None:
                    beside.cancel()
            lost = service.lost
        if tracer is not None:
            await asyncio.to_thread(tracer.close)  # after the last part in a peer's answer
        if lost is not None:  # a supervisor starts the program again, with a fresh device
            raise lost


def check_models(policy: Policy, served: Sequence[str]) -> None:
    """Raises ConfigError for a model in the policy that is not served: it may be another's name, misspelt."""
    named = {*policy.models, *(name for grant in policy.keys.values() for name in grant.models or ())}
    for name in sorted(named - set(served)):
        raise ConfigError(f"[policy] names the model {name}, which is not served here; there are {', '.join(served)}.")


def api_keys_of(settings: NodeSettings) -> tuple[str, ...]:
    """The keys of the settings, with those of standard input (`-`) and of the file. Raises ConfigError.

    Standard input is read to its end.
    """
    given = [secret_lines(Path(key)) if key == STDIN else [key] for key in settings.api_keys]
    if settings.api_key_file is not None:
        given.append(secret_lines(settings.api_key_file))
    return tuple(key for keys in given for key in keys)


def open_energy(settings: NodeSettings, model: ServedModel) -> SideEnergy:
    """Find the meter of this side, which the log names, and open what the device remembers of its budget.

    Raises ConfigError for a meter that is named and cannot be used.
    """
    found = energy_meter(settings, model.engine.info)
    _log.info("energy is %s", found.text)
    budget: tuple[float, Unit] | None = None
    if isinstance(settings, AgentSettings) and settings.energy_per_token is not None:
        budget = settings.energy_per_token, "token"
    kept = settings.state_dir if settings.side == "device" else None
    return SideEnergy(found.meter, settings.energy.send_watts, budget, kept)


def energy_meter(settings: NodeSettings, info: ModelInfo | None) -> ChosenMeter:
    """The meter of this side. info: None where the model is not loaded. Raises ConfigError."""
    if info is not None:
        device = device_of(settings, info)
    else:
        device = "cpu" if settings.first_model == "fake" else choose_device(settings.engine_device)
    on_gpu = device.startswith("cuda")
    uuid = gpu_uuid(device) if on_gpu else None
    return choose_meter(settings.energy, None if info is None else info.shape, gpu=on_gpu, gpu_uuid=uuid)


def open_store(settings: NodeSettings, database: Home | None = None) -> DocumentStore:
    """Open this side's document store, creating an empty one if there is none. The caller closes it. database: in which
    several servers have it together.

    One that lies there in plain text is encrypted first if the settings say so.
    """
    embedder = load_embedder(settings.embedder)
    store = DocumentStore.open(
        settings.docs_dir, embedder, side=settings.side, encrypt=settings.encrypt_documents, home=database
    )
    try:
        if settings.encrypt_documents and not store.seal.is_on:
            store.encrypt()
    except BaseException:
        store.close()
        raise
    return store


def open_reranker(settings: NodeSettings, store: DocumentStore) -> Reranker | None:
    """Load the reranker that the settings name; None where they name none. Raises ConfigError when it is not here."""
    if settings.tuning.reranker is None:
        return None
    encoder = store.embedder if isinstance(store.embedder, MiniLMEmbedder) else None
    return load_reranker(settings.tuning.reranker, encoder=encoder)


def open_web(settings: NodeSettings) -> WebAccess | None:
    """What the settings let the workflow `research` search; None without it."""
    if settings.web_search is None:
        return None
    limits = WebLimits(results=settings.tuning.web_results, pages=settings.tuning.web_pages)
    if settings.web_search == STORE:
        return WebAccess(None, limits)
    return WebAccess(SearxngSearch(settings.web_search, timeout_s=limits.search_s), limits)


def open_outside(settings: NodeSettings) -> OutsideEndpoint | None:
    """The stranger's endpoint of the settings, with what is hidden from it; None where there is none. Raises
    ConfigError for a model of names that cannot be used."""
    outside = settings.outside
    if outside.url is None or outside.model is None:
        return None
    find = find_entities if outside.entities is None else combined(find_entities, load_entity_model(outside.entities))
    return OutsideEndpoint(outside.url, outside.model, outside.key, find=find)


def open_stimuli(settings: NodeSettings) -> StimulusLog | None:
    """The log of what machines are told, begun anew; None where the settings want none. Raises ConfigError."""
    if settings.log_level != "debug":
        return None
    private_folder(settings.state_dir)
    try:
        return StimulusLog(settings.state_dir / STIMULI, text=settings.tuning.log_text)
    except OSError as error:
        raise ConfigError(f"{STIMULI} cannot be written in {settings.state_dir}: {error.strerror}") from error


def open_kv(settings: NodeSettings, store: DocumentStore) -> DocumentKvStore | None:
    """Open the store of the documents' KV, or None if the settings keep none.

    It lies in the folder of the documents, so that it is moved and deleted with them.
    """
    if isinstance(settings, ServerSettings) and settings.engine_url:
        return None  # its servers keep their rows
    limit = settings.tuning.document_kv_mib << 20
    return DocumentKvStore(settings.docs_dir / FOLDER, limit, seal=store.seal) if limit else None


def door_limits(settings: NodeSettings) -> DoorLimits:
    every_user = settings.tuning.local_users == "any"
    if not every_user and not can_tell():
        _log.warning("this system does not tell whose a connection is: without keys, every user of it is let in")
    return DoorLimits(
        settings.tuning.strangers_per_address,
        networks(settings.trusted_proxies),
        origins=frozenset(settings.allowed_origins),
        every_user=every_user,
    )
