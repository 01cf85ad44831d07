"""A real node, its fake model and a store of hashed vectors, behind a real server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine, fake_model
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.node import Node
from paceline.runtime.resources import NodeParts
from paceline.strategies.base import Side
from tests.api.scripted import client_of, running

MAX_POSITIONS = 1024


@contextmanager
def serving_node(directory: Path, engine: FakeEngine | None = None) -> Iterator[tuple[str, FakeEngine]]:
    """(URL, engine) of a cloud without a peer. Asserts at the end that the engine holds no rows."""
    engine = engine or FakeEngine(3, spread=0.3, max_positions=MAX_POSITIONS)
    with DocumentStore.open(directory, HashEmbedder()) as store:
        node = Node("cloud", LoadedModel(engine, ByteTokenizer()), store)
        with running(create_app(node, keyring=Keyring({})), node) as url:
            yield url, engine
    engine.check()
    assert not engine._rows, "rows were not released"


@contextmanager
def serving_documents(
    directory: Path, texts: Mapping[str, str], *keys: str, side: Side = "cloud", parts: NodeParts | None = None
) -> Iterator[str]:
    """The URL of a side whose documents these are, by their names. keys: without, none is asked for."""
    with DocumentStore.open(directory, HashEmbedder()) as store:
        for name, text in texts.items():
            store.add_text(name, text, zone=side)
        node = Node(side, fake_model(), store, parts or NodeParts())
        with running(create_app(node, keyring=Keyring(dict.fromkeys(keys))), node) as url:
            yield url


@pytest.fixture
def url(node_url: str) -> str:
    """For modules that import it: their server is the node that all tests share."""
    return node_url


@pytest.fixture
def http(node_url: str) -> Iterator[httpx.Client]:
    """Likewise."""
    with client_of(node_url) as client:
        yield client
