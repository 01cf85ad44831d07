"""What both programs open before they serve: the model they were told of, and the documents of their side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.api.responses.event_log import Retention
from paceline.core.sampling.sampler import SamplingDefaults
from paceline.engine.base import LoadedModel
from paceline.engine.loader import load_model
from paceline.engine.wrappers import DelayedEngine
from paceline.errors import ConfigError
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import load_embedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.lookup_tables.store import FOLDER as TABLES
from paceline.runtime.lookup_tables.store import TableStore
from paceline.settings import NodeSettings

DEMO = "demo"


def open_model(settings: NodeSettings, demo: Path) -> LoadedModel:
    """The model of the settings; `demo` is what that word means on this side. Raises ConfigError with what to do.

    Its engine is paced where the settings emulate a slower machine.
    """
    emulation = Emulation.parse(settings.emulate or "")
    shipped = settings.model == DEMO
    if shipped and not demo.is_dir():
        raise ConfigError(f"The demonstration model is not in {demo}: install paceline again, or give --model.")
    model = load_model(
        demo if shipped else settings.model,
        backend=settings.backend,
        dtype=settings.dtype,
        threads=settings.threads,
        name=DEMO if shipped else None,
    )
    if not (emulation.forward or emulation.row):
        return model
    return replace(model, engine=DelayedEngine(model.engine, emulation.forward, emulation.row))


def served_name(settings: NodeSettings, model: LoadedModel) -> str:
    """What clients call the model."""
    return settings.name or (DEMO if settings.model == DEMO else model.engine.info.name)


def sampling_of(settings: NodeSettings) -> SamplingDefaults:
    """What the owner of this program has set for requests that do not say."""
    return SamplingDefaults(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
    )


def open_store(settings: NodeSettings) -> DocumentStore:
    """This side's documents, none at first. The caller closes it."""
    return DocumentStore.open(settings.docs_dir, load_embedder(settings.embedder), side=settings.side)


def open_tables(settings: NodeSettings, model: LoadedModel) -> TableStore:
    """What answers are drafted from: one table a key, in the state directory."""
    tokenizer = model.tokenizer
    return TableStore(settings.state_dir / TABLES, tokenizer.fingerprint, tokenizer.vocab_size)


def open_kv(settings: NodeSettings) -> DocumentKvStore | None:
    """Where a model's reading of the documents is kept: beside them, so that it goes with them."""
    limit = settings.document_kv_mib << 20
    return DocumentKvStore(settings.docs_dir / FOLDER, limit) if limit else None


def retention_of(settings: NodeSettings) -> Retention:
    return Retention(settings.responses_mib << 20, settings.responses_days * 86_400)
