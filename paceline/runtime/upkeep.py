"""What a node does for ever beside its answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.energy.debt_file import SAVE_S
from paceline.runtime.energy.side import SideEnergy
from paceline.runtime.engine_loop.document_prefill import WATCH_S, DocumentPrefiller
from paceline.runtime.workflows.kept_profiles import SAVE_S as PROFILES_S
from paceline.runtime.workflows.kept_profiles import KeptProfiles

log = logging.getLogger("paceline.node")


async def watch_removals(store: DocumentStore, forget: Callable[[int], None]) -> None:
    """Erase from memory what was learnt of documents that this or another process has removed. forget: told the number
    of removals so far."""
    while True:
        try:
            forget(await asyncio.to_thread(store.removals))
        except ConfigError as error:  # the disk; the next request fails for it too
            log.warning("removed documents cannot be looked for: %s", error)
        await asyncio.sleep(WATCH_S)


async def keep_debt(energy: SideEnergy) -> None:
    while True:
        await asyncio.sleep(SAVE_S)
        await asyncio.to_thread(energy.save)


async def keep_profiles(profiles: KeptProfiles) -> None:
    while True:
        await asyncio.sleep(PROFILES_S)
        await profiles.save()


async def prefill_documents(prefiller: DocumentPrefiller, is_busy: Callable[[], bool]) -> None:
    """Prefill the KV of new documents while no answer is being written."""
    while True:
        try:
            await prefiller.prefill_missing(is_busy)
        except Exception:
            log.exception("KV of documents could not be computed ahead")
        await asyncio.sleep(WATCH_S)
