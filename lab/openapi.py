"""Generate `openapi/openapi.json` from the code: `python -m lab.openapi`.

Describes the server's own application, built with the fake model and no documents; it serves no request.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.engine.fake import fake_model
from paceline.rag.embedder import load_embedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.identity import PrivateKey
from paceline.runtime.node import Node
from paceline.runtime.resources import NodeParts, Offer
from paceline.wire.messages import Introduction
from server.app import add_devices
from server.devices import Registry
from server.links import Links


@contextmanager
def sample(directory: Path, keyring: Keyring) -> Iterator[tuple[Node, FastAPI]]:
    """Build the application as the program does, with its files in `directory`; the node has not been entered."""
    with DocumentStore.open(directory / "docs", load_embedder("hash")) as store:
        node = Node("cloud", fake_model(0), store, NodeParts(offer=Offer(max_tokens=8)))
        registry = Registry(directory)
        links = Links(registry, node.on_link, _no_introduction, key=PrivateKey.generate())
        yield node, add_devices(create_app(node, keyring=keyring), registry, links)


def document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, sample(Path(directory), Keyring({})) as (_, app):
        return app.openapi()


def text() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def _no_introduction() -> Introduction:
    raise AssertionError("no link is opened to an application that is only described")


if __name__ == "__main__":
    sys.stdout.write(text())
