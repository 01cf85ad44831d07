"""The server as a process: opens what the settings name, serves until a signal, and closes everything it opened."""

from __future__ import annotations

import logging
import socket
from contextlib import closing

from fastapi import FastAPI

from paceline.api.generation.links import Addresses
from paceline.api.http.auth import Keyring, check_exposure, parse_keys
from paceline.api.http.server import listen
from paceline.bootstrap import Background, OpenedNode, api_keys_of, door_limits, retention_of, run_node
from paceline.models import shipped
from paceline.runtime.link.emulation import Emulation
from paceline.settings import ServerSettings

from .app import create_server
from .devices import Registry
from .draft_model import opened_draft
from .identity import server_key
from .keys import Keys
from .links import Links

_log = logging.getLogger("paceline.server")


async def run(settings: ServerSettings) -> None:
    """Serve until a signal. Raises ConfigError for settings that cannot be used, before the first request is read."""
    configured = parse_keys(api_keys_of(settings))
    emulation = Emulation.parse(settings.emulate) if settings.emulate else None
    key = server_key(settings.state_dir)
    registry = Registry(settings.state_dir, away_days=settings.device_days)
    live: Links | None = None
    with Keys(settings.state_dir).current() as stored:
        keyring = Keyring(configured, stored)

        async def compose(opened: OpenedNode) -> tuple[FastAPI, Background]:
            nonlocal live
            live = Links(
                registry,
                opened.node,
                opened.introduction,
                key=key,
                credential_hours=settings.credential_hours,
                emulation=emulation,
                vocab_size=opened.vocab_size,
            )
            app = create_server(
                opened.service,
                registry,
                live,
                keyring=keyring,
                documents=settings.documents,
                state=settings.state_dir,
                retention=retention_of(settings),
                limits=door_limits(settings),
                seal=opened.seal,
                tracer=opened.tracer,
                addresses=Addresses(settings.public_url or ""),
                longest_silent=settings.longest_silent_answer,
            )
            return app, live.watch

        with closing(_listen(settings, keyring)) as listener:
            stages = None
            if settings.stages:
                from .stages import opened_stages  # with torch, which a server of the fake model does without

                stages = opened_stages(settings, key, registry)
            draft = opened_draft(settings)
            await run_node(
                settings,
                listener,
                shipped("cloud"),
                compose,
                expects_peer=lambda: live is not None and live.has_devices,
                open_engine=stages,
                open_draft=draft,
            )
    _log.info("stopped")


def _listen(settings: ServerSettings, keyring: Keyring) -> socket.socket:
    check_exposure(settings.host, keyring)
    return listen(settings.host, settings.port)
