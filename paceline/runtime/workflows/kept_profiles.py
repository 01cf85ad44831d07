"""What a side's units take, kept in its state directory: learnt while workflows run, believed after a restart.

It is believed under the same conditions alone: model, embedder, machine, threads. Written whole or not at all, every
few minutes in which something was learnt, and at the end. Not handled: two programs of one side on one state directory;
the later one's stays.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Final

import psutil

from paceline.errors import ConfigError
from paceline.secret_files import private_folder, read_private, write_private
from paceline.system import cores, processor
from paceline.workflow.profiles import Profiles

FILE: Final = "profiles.json"
FORMAT: Final = 1
SAVE_S: Final = 300.0

log = logging.getLogger("paceline.workflow")


class KeptProfiles:
    """Profiles of a running node; belongs to its event loop. Nothing here raises: a file or a disk that cannot be used
    costs a line in the log, and learning begins anew."""

    def __init__(self, state_dir: Path, conditions: str) -> None:
        """conditions: under which they are believed, in words."""
        self.path = state_dir / FILE
        self.conditions = conditions
        self._profiles: Profiles | None = None
        self._saved = 0  # revision

    def open(self) -> Profiles:
        """What is known, read at the first call."""
        if self._profiles is None:
            self._profiles = self._read() or Profiles()
            self._saved = self._profiles.revision
        return self._profiles

    async def save(self) -> None:
        """Write what was learnt since."""
        profiles = self._profiles
        if profiles is None or profiles.revision == self._saved:
            return
        revision = profiles.revision
        kept = {"format": FORMAT, "conditions": self.conditions, "learnt": json.loads(profiles.to_json())}
        try:
            await asyncio.to_thread(self._write, json.dumps(kept).encode())
        except (OSError, ConfigError) as error:
            log.warning("What units take cannot be kept in %s: %s", self.path, error)
            return
        self._saved = revision

    def _write(self, content: bytes) -> None:
        private_folder(self.path.parent)
        write_private(self.path, content)

    def _read(self) -> Profiles | None:
        try:
            content = read_private(self.path, otherwise="remove it")
            if content is None:
                return None
            kept = json.loads(content)
            if kept["format"] == FORMAT and kept["conditions"] == self.conditions:
                return Profiles.from_json(json.dumps(kept["learnt"]))
            log.warning("%s is of another model, machine or setting: what units take is learnt anew", self.path)
        except (ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s cannot be used (%s): what units take is learnt anew", self.path, error)
        return None


def describe_machine(gpu: str | None = None) -> str:
    """Processor, cores that this process may use, GiB of memory, and the GPU."""
    gib = round(psutil.virtual_memory().total / 2**30)
    return f"{processor()}, {len(cores())} cores, {gib} GiB{'' if gpu is None else f', {gpu}'}"
