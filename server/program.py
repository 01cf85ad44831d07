"""The server as a process: opens what the settings name, serves until a signal, and closes everything it opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from fastapi import FastAPI

from paceline.api.http.auth import Keyring, check_exposure, parse_keys
from paceline.api.http.server import listen, url_of
from paceline.bootstrap import Background, OpenedNode, api_keys_of, run_node
from paceline.commands.options import opened_database
from paceline.engine.base import Engine, LoadedModel, ServedModel
from paceline.engine.loader import folder_of, load_model
from paceline.errors import ConfigError
from paceline.hub.cache import find_gguf
from paceline.models import CAUSAL, DEVICE, shipped
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link.emulation import Emulation
from paceline.secret_files import private_folder, read_private, write_private
from paceline.settings import ServerSettings
from paceline.sql import Home, transaction

from .app import add_devices, add_hops
from .devices import Registry
from .keys import Keys
from .links import Links

if TYPE_CHECKING:
    from paceline.postgres import Postgres

_log = logging.getLogger("paceline.server")


def opened_draft(settings: ServerSettings) -> Callable[[ServedModel], Engine] | None:
    """What loads the draft model that the setting `draft_model` names, given the model that it drafts for; None where
    none is named. Raises ConfigError for a draft model that cannot be loaded, and what it returns for one that cannot
    draft for the model."""
    wanted = settings.draft_model
    if wanted is None:
        return None
    path = DEVICE if wanted == CAUSAL else wanted
    if not wanted.startswith("fake") and find_gguf(path) is None:
        folder_of(path)  # fetched now, so that a wrong name is said before the model is loaded

    def load(model: ServedModel) -> Engine:
        draft = load_model(
            path,
            dtype=settings.dtype,
            device=settings.engine_device,
            threads=settings.tuning.threads,
            kv_mib=settings.tuning.draft_kv_mib,
        )
        check_vocabulary(wanted, draft, settings.first_model, model)
        _log.info("drafts of answers that are written here come from %s", wanted)
        return draft.engine

    return load


def check_vocabulary(draft_name: str, draft: LoadedModel, name: str, model: ServedModel) -> None:
    """Raises ConfigError unless both models give every token id the same meaning."""
    if draft.tokenizer.fingerprint == model.tokenizer.fingerprint:
        return
    sizes = draft.tokenizer.vocab_size, model.tokenizer.vocab_size
    differs = f"{sizes[0]} tokens, not {sizes[1]}" if sizes[0] != sizes[1] else "as many tokens with other meanings"
    raise ConfigError(
        f"The draft model {draft_name} cannot draft for {name}: its vocabulary has {differs}. Give a draft model of "
        "the same family, or leave draft_model out."
    )


FILE = "server-key.pem"  # PKCS #8
_KEY_TABLE = "CREATE TABLE IF NOT EXISTS server_key (one INTEGER PRIMARY KEY, pem BLOB NOT NULL)"


def common_key(state_dir: Path, database: Postgres) -> PrivateKey:
    """The key of all servers of a database: that of this one's folder, if it was the first. Raises ConfigError."""
    own = server_key(state_dir)
    with database.explained(), closing(database.place("server key", "").connect()) as rows, transaction(rows):
        rows.execute(_KEY_TABLE)
        rows.execute("INSERT INTO server_key VALUES (1, ?) ON CONFLICT (one) DO NOTHING", (_pem(own),))
        content = rows.execute("SELECT pem FROM server_key").fetchall()[0][0]
    return _read_key(content, "the server key in the database")


def server_key(state_dir: Path) -> PrivateKey:
    """Read the server's key, which its devices pin when they enrol, making it if there is none. Raises ConfigError for
    one that cannot be used."""
    file = state_dir / FILE
    otherwise = "remove it, so that a new one is made, and enrol all devices again"
    try:
        private_folder(state_dir)
        content = read_private(file, otherwise=otherwise)
        if content is None:
            write_private(file, _pem(PrivateKey.generate()), replace=False)  # another process may have been first
            content = read_private(file, otherwise=otherwise) or b""
    except OSError as error:
        raise ConfigError(f"The server's key cannot be kept in {file}: {error.strerror}. Check --state-dir.") from error
    return _read_key(content, file)


def _read_key(content: bytes, where: object) -> PrivateKey:
    try:
        key = load_pem_private_key(content, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise TypeError(type(key))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{where} is not an Ed25519 key: restore it from a copy, or remove it, so that a new one is made, and "
            "enrol all devices again."
        ) from error
    return PrivateKey(key.private_bytes_raw())


def _pem(key: PrivateKey) -> bytes:
    private = Ed25519PrivateKey.from_private_bytes(key.seed)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


async def run(settings: ServerSettings) -> None:
    """Serve until a signal. Raises ConfigError for settings that cannot be used, before the first request is read."""
    configured = parse_keys(api_keys_of(settings))
    emulation = Emulation.parse(settings.tuning.emulate) if settings.tuning.emulate else None
    live: Links | None = None
    with closing(listen(settings.host, settings.port)) as listener, ExitStack() as opened_here:
        if (database := opened_database(settings)) is not None:
            opened_here.callback(database.close)
        key = server_key(settings.state_dir) if database is None else common_key(settings.state_dir, database)
        state: Path | Home = settings.state_dir if database is None else database
        fleet = None if database is None else database.join(settings.server_url or url_of(listener))
        registry = Registry(state, away_days=settings.tuning.device_days)
        with Keys(state).current() as stored:
            keyring = Keyring(configured, stored)
            check_exposure(settings.host, keyring)

            async def compose(opened: OpenedNode) -> tuple[FastAPI, Background]:
                nonlocal live
                live = Links(
                    registry,
                    opened.node.on_link,
                    opened.introduction,
                    key=key,
                    credential_hours=settings.tuning.credential_hours,
                    emulation=emulation,
                    vocab_size=opened.vocab_size,
                    fleet=fleet,
                )
                app = add_devices(opened.app(settings, keyring), registry, live)
                if fleet is not None:
                    add_hops(app, fleet, key, live.has)
                    live.is_leaving = lambda: app.state.admission.leaving
                return app, live.watch

            stages = None
            if settings.stages:
                from .stages import opened_stages  # with torch, which a server of the fake model does without

                stages = opened_stages(settings, key, registry)
            await run_node(
                settings,
                listener,
                shipped("cloud"),
                compose,
                expects_peer=lambda: live is not None and live.has_devices,
                open_engine=stages,
                open_draft=opened_draft(settings),
                database=database,
                names=keyring.name_of,
            )
    _log.info("stopped")
