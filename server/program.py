"""The cloud as a process: opens what the settings name, serves until a signal, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing

import typer

from paceline.api.http.auth import Keyring, check_exposure, parse_keys
from paceline.api.http.server import listen, serve, url_of
from paceline.bootstrap import open_kv, open_model, open_store, open_tables, retention_of, sampling_of, served_name
from paceline.models import CLOUD
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.node import Node
from paceline.settings import ServerSettings
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import VERSION, Welcome

from .app import create_server
from .devices import Registry
from .keys import Keys
from .links import Links

_log = logging.getLogger("paceline.server")


async def run(settings: ServerSettings) -> None:
    """Until a signal. Raises ConfigError for what cannot be used, before anything listens for long."""
    configured = parse_keys(settings.api_keys)
    emulation = Emulation.parse(settings.emulate) if settings.emulate else None
    registry = Registry(settings.state_dir)
    with (
        Keys(settings.state_dir).current() as stored,
        closing(_listen(settings, keyring := Keyring(configured, stored))) as listener,
        open_store(settings) as store,
    ):
        model = open_model(settings, CLOUD)
        info = model.engine.info
        name = served_name(settings, model)
        node = Node(
            "cloud",
            model,
            store,
            served_name=name,
            sampling=sampling_of(settings),
            max_tokens_default=settings.max_tokens_default,
            kv=open_kv(settings),
            tables=open_tables(settings, model),
            timed=True,
        )

        def welcome() -> Welcome:
            return Welcome(
                version=VERSION,
                tokenizer=model.tokenizer.fingerprint,
                model=info.fingerprint,
                model_name=name,
                strategies=list(STRATEGIES),
                documents=node.num_documents,
            )

        def ready() -> None:
            typer.echo(f"paceline: serving {name} on {url_of(listener)} ({node.num_documents} documents)")

        async with node, asyncio.TaskGroup() as tasks:
            vocab_size = min(info.vocab_size, model.tokenizer.vocab_size)
            live = Links(registry, node, welcome, emulation=emulation, vocab_size=vocab_size)
            watcher = tasks.create_task(live.watch())
            app = create_server(
                node,
                registry,
                live,
                keyring=keyring,
                documents=settings.documents,
                state=settings.state_dir,
                retention=retention_of(settings),
            )
            await serve(app, listener, on_ready=ready)
            watcher.cancel()
    _log.info("stopped")


def _listen(settings: ServerSettings, keyring: Keyring) -> socket.socket:
    check_exposure(settings.host, keyring)
    return listen(settings.host, settings.port)
