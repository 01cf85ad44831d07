"""What both programs open before they serve: the model they were told of, and the documents of their side."""

from __future__ import annotations

from pathlib import Path

from paceline.engine.contract import LoadedModel
from paceline.engine.load import load_model
from paceline.errors import ConfigError
from paceline.rag.embed import load_embedder
from paceline.rag.store import DocumentStore
from paceline.settings import NodeSettings

DEMO = "demo"


def open_model(settings: NodeSettings, demo: Path) -> LoadedModel:
    """The model of the settings; `demo` is what that word means on this side. Raises ConfigError with what to do."""
    shipped = settings.model == DEMO
    if shipped and not demo.is_dir():
        raise ConfigError(f"The demonstration model is not in {demo}: install paceline again, or give --model.")
    return load_model(
        demo if shipped else settings.model,
        backend=settings.backend,
        dtype=settings.dtype,
        threads=settings.threads,
        name=DEMO if shipped else None,
    )


def served_name(settings: NodeSettings, model: LoadedModel) -> str:
    """What clients call the model."""
    return settings.name or (DEMO if settings.model == DEMO else model.engine.info.name)


def open_store(settings: NodeSettings) -> DocumentStore:
    """This side's documents, none at first. The caller closes it."""
    return DocumentStore.open(settings.docs_dir, load_embedder(settings.embedder))
