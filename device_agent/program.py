"""The agent as a process: serves from the start, together with its cloud once linked, alone until then."""

from __future__ import annotations

import logging
from contextlib import closing

import msgspec
from fastapi import FastAPI

from paceline.api.http.auth import Keyring, check_exposure, key_id, parse_keys
from paceline.api.http.server import listen
from paceline.bootstrap import Background, OpenedNode, api_keys_of, run_node
from paceline.core.policy import ANY_KEY
from paceline.core.side import NOBODY
from paceline.errors import ConfigError
from paceline.models import shipped
from paceline.runtime.asking import ActivityLog, AskCounter, CloudAsks, permission
from paceline.runtime.link.emulation import Emulation
from paceline.secret_files import STDIN, given_secret
from paceline.settings import AgentSettings
from paceline.wire.messages import Introduction

from .cloud import Cloud, Credentials

PEER = "cloud"  # its name at this side's node

_log = logging.getLogger("paceline.agent")


async def run(settings: AgentSettings) -> None:
    """Serve until a signal. Raises ConfigError for what cannot be used: settings, model, documents, enrolment."""
    code, keys = _secrets(settings)
    named = parse_keys(keys)
    keyring = Keyring(dict.fromkeys(named))
    names = {key_id(key): name for key, name in named.items() if name}
    if unknown := sorted({*settings.policy.keys} - {*names.values(), ANY_KEY}):
        raise ConfigError(f"[policy.keys] names {unknown[0]}, and no key is given as KEY={unknown[0]} (api_keys).")
    check_exposure(settings.host, keyring)
    emulation = Emulation.parse(settings.tuning.emulate) if settings.tuning.emulate else None

    may_ask, origin = permission(settings)
    hint = "; --cloud-may-ask allows it" if may_ask == NOBODY else ""
    _log.info("clients of the cloud may ask this device: %s (%s)%s", may_ask, origin, hint)
    limits = AskCounter(settings.cloud_asks_per_minute, settings.cloud_asks_per_hour)

    async def compose(opened: OpenedNode) -> tuple[FastAPI, Background | None]:
        def introduce() -> Introduction:
            known = opened.introduction()
            return msgspec.structs.replace(
                known,
                documents=0 if may_ask == NOBODY else known.documents,  # nobody who may not ask needs to know
                asked_by=None if may_ask.names is None else list(may_ask.names),
            )

        cloud = None
        if settings.cloud is not None:
            cloud = Cloud(
                settings.clouds,
                Credentials(settings.state_dir),
                code=code,
                name=settings.device,
                introduce=introduce,
                up=lambda link: opened.node.on_link(link, PEER),
                emulation=emulation,
                vocab_size=opened.vocab_size,
            )
            await cloud.enrol()
        app = opened.app(settings, keyring, cloud=next(iter(settings.clouds), ""))
        return app, None if cloud is None else cloud.keep_linked

    with closing(listen(settings.host, settings.port)) as listener:
        await run_node(
            settings,
            listener,
            shipped("device"),
            compose,
            expects_peer=lambda: settings.cloud is not None,
            asks=CloudAsks(may_ask, limits, ActivityLog(settings.state_dir)),
            names=lambda owner: names.get(owner, ""),
        )
    _log.info("stopped")


def _secrets(settings: AgentSettings) -> tuple[str | None, tuple[str, ...]]:
    """The enrolment code and the API keys, wherever they come from."""
    sources = (settings.code, str(settings.code_file or ""), *settings.api_keys, str(settings.api_key_file or ""))
    if sources.count(STDIN) > 1:
        raise ConfigError("Standard input can be read for one of code and api_keys only: give the other in a file.")
    return given_secret("code", settings.code, settings.code_file), api_keys_of(settings)
