"""A real node, its fake model and a store of hashed vectors, behind a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.api.http.server import HttpServer, listen, url_of
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.node import Node
from tests.api.scripted import WAIT

MAX_POSITIONS = 1024


@contextmanager
def serving_node(directory: Path, engine: FakeEngine | None = None) -> Iterator[tuple[str, FakeEngine]]:
    """(URL, engine) of a cloud without a peer. Asserts at the end that the engine holds no rows."""
    engine = engine or FakeEngine(3, spread=0.3, max_positions=MAX_POSITIONS)
    listener = listen("127.0.0.1", 0)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    servers: list[HttpServer] = []

    model = LoadedModel(engine, ByteTokenizer())

    async def serve() -> None:
        with DocumentStore.open(directory, HashEmbedder()) as store:
            async with Node("cloud", model, store) as node:
                servers.append(HttpServer(create_app(node, keyring=Keyring({})), ready.set))
                await servers[0].serve([listener])

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    url = url_of(listener)
    thread.start()
    try:
        assert ready.wait(WAIT)
        yield url, engine
    finally:
        loop.call_soon_threadsafe(servers[0].stop)
        thread.join(WAIT)
        loop.close()
        assert not thread.is_alive()
    engine.check()
    assert not engine._rows, "rows were not released"
