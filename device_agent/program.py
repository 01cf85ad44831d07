"""The device as a process: serves from the start, with its cloud as soon as there is one, alone until then."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing

import typer

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring, check_exposure, parse_keys
from paceline.api.http.server import listen, serve, url_of
from paceline.bootstrap import open_kv, open_model, open_store, open_tables, retention_of, sampling_of, served_name
from paceline.models import DEVICE
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.node import Node
from paceline.settings import AgentSettings
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import VERSION, Hello

from .cloud import Cloud
from .credentials import Credential, Credentials

PEER = "cloud"  # its name at this side's node

_log = logging.getLogger("paceline.agent")


async def run(settings: AgentSettings) -> None:
    """Until a signal. Raises ConfigError for what cannot be used: settings, model, documents, enrolment."""
    keyring = Keyring(dict.fromkeys(parse_keys(settings.api_keys)))
    check_exposure(settings.host, keyring)
    emulation = Emulation.parse(settings.emulate) if settings.emulate else None
    with closing(listen(settings.host, settings.port)) as listener, open_store(settings) as store:
        model = open_model(settings, DEVICE)
        info = model.engine.info
        name = served_name(settings, model)
        node = Node(
            "device",
            model,
            store,
            served_name=name,
            sampling=sampling_of(settings),
            max_tokens_default=settings.max_tokens_default,
            expects_peer=settings.cloud is not None,
            open_to_peer=settings.share_distributions,
            kv=open_kv(settings),
            tables=open_tables(settings, model),
            timed=True,
        )

        def hello(credential: Credential) -> Hello:
            return Hello(
                version=VERSION,
                device=credential.device,
                credential=credential.secret,
                tokenizer=model.tokenizer.fingerprint,
                model=info.fingerprint,
                model_name=name,
                strategies=list(STRATEGIES),
                documents=node.num_documents,
            )

        def ready() -> None:
            typer.echo(f"paceline: serving {name} on {url_of(listener)} ({node.num_documents} documents)")

        async with node:
            cloud = None
            if settings.cloud is not None:
                cloud = Cloud(
                    settings.cloud,
                    Credentials(settings.state_dir),
                    code=settings.code,
                    name=settings.device,
                    hello=hello,
                    up=lambda link: node.on_link(link, PEER),
                    emulation=emulation,
                    vocab_size=min(info.vocab_size, model.tokenizer.vocab_size),
                )
                await cloud.enrol()
            app = create_app(
                node,
                keyring=keyring,
                documents=settings.documents,
                state=settings.state_dir,
                retention=retention_of(settings),
            )
            async with asyncio.TaskGroup() as tasks:
                linking = None if cloud is None else tasks.create_task(cloud.keep_linked())
                await serve(app, listener, on_ready=ready)
                if linking is not None:
                    linking.cancel()
    _log.info("stopped")
