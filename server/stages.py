"""The stages of this server's model: enrolled at it as devices are, with a role of their own, or started by it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from paceline.engine.base import AsyncEngine
from paceline.engine.loader import EngineOptions
from paceline.errors import ConfigError, StorageError
from paceline.runtime.stages.opening import StagesWanted, open_stages
from paceline.settings import ServerSettings
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim, Signer

from .devices import Registry


def opened_stages(
    settings: ServerSettings, key: Signer, registry: Registry
) -> Callable[[Path, str], AbstractContextManager[AsyncEngine]]:
    """Raises ConfigError for a setting that cannot be used."""
    try:
        wanted = StagesWanted.parse(settings.stages)
    except ValueError as error:
        raise ConfigError(f"stages = {','.join(settings.stages)} cannot be used: {error}.") from None

    async def admit(claim: Claim) -> bytes | CloseCode:
        return await asyncio.to_thread(registry.recognise, claim, "stage")

    async def standing(name: str, stage_key: bytes) -> CloseCode | None:
        try:
            refusal, _ = await asyncio.to_thread(registry.standing, name, stage_key)
        except (sqlite3.Error, StorageError):
            return None  # looked up again in a second
        return refusal

    tuning = settings.tuning
    options = EngineOptions("paged", settings.dtype, settings.engine_device, tuning.threads, None, settings.kv_mib)
    form = None if tuning.stage_format == "auto" else tuning.stage_format

    @contextmanager
    def opened(directory: Path, name: str) -> Iterator[AsyncEngine]:
        pipeline = open_stages(
            directory, wanted, name=name, key=key, admit=admit, options=options, format=form, standing=standing
        )
        try:
            yield pipeline
        finally:
            pipeline.close()

    return opened
