"""The agent as a process: serves from the start, together with its cloud once linked, alone until then."""

from __future__ import annotations

import logging
from contextlib import closing

from fastapi import FastAPI

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring, check_exposure, parse_keys
from paceline.api.http.server import listen
from paceline.bootstrap import Background, OpenedNode, retention_of, run_node
from paceline.core.permission import NOBODY
from paceline.models import DEVICE
from paceline.runtime.asking.activity import ActivityLog
from paceline.runtime.asking.answers import permission
from paceline.runtime.asking.gate import CloudAsks
from paceline.runtime.asking.limits import AskLimits
from paceline.runtime.link.emulation import Emulation
from paceline.settings import AgentSettings
from paceline.wire.messages import Hello

from .cloud import Cloud
from .credentials import Credential, Credentials

PEER = "cloud"  # its name at this side's node

_log = logging.getLogger("paceline.agent")


async def run(settings: AgentSettings) -> None:
    """Serve until a signal. Raises ConfigError for what cannot be used: settings, model, documents, enrolment."""
    keyring = Keyring(dict.fromkeys(parse_keys(settings.api_keys)))
    check_exposure(settings.host, keyring)
    emulation = Emulation.parse(settings.emulate) if settings.emulate else None

    may_ask, origin = permission(settings)
    _log.info("clients of the cloud may ask this device: %s (%s)", may_ask, origin)
    limits = AskLimits(settings.cloud_asks_per_minute, settings.cloud_asks_per_hour)

    async def compose(opened: OpenedNode) -> tuple[FastAPI, Background | None]:
        def hello(credential: Credential) -> Hello:
            known = opened.introduction()
            if may_ask == NOBODY:
                known["documents"] = 0  # nor does a cloud need to know how many there are
            return Hello(
                device=credential.device,
                credential=credential.secret,
                asked_by=None if may_ask.names is None else list(may_ask.names),
                **known,
            )

        cloud = None
        if settings.cloud is not None:
            cloud = Cloud(
                settings.cloud,
                Credentials(settings.state_dir),
                code=settings.code,
                name=settings.device,
                hello=hello,
                up=lambda link: opened.node.on_link(link, PEER),
                emulation=emulation,
                vocab_size=opened.vocab_size,
            )
            await cloud.enrol()
        app = create_app(
            opened.node,
            keyring=keyring,
            documents=settings.documents,
            state=settings.state_dir,
            retention=retention_of(settings),
        )
        return app, None if cloud is None else cloud.keep_linked

    with closing(listen(settings.host, settings.port)) as listener:
        await run_node(
            settings,
            listener,
            DEVICE,
            compose,
            expects_peer=settings.cloud is not None,
            open_to_peer=settings.share_distributions,
            asks=CloudAsks(may_ask, limits, ActivityLog(settings.state_dir)),
        )
    _log.info("stopped")
