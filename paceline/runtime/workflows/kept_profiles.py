"""Profiles of a side's units in its state directory, measured by `paceline profile` and refined by what has run.

They are believed under the conditions alone under which they were measured: the same model, embedder, machine and
threads. Written whole or not at all, every few minutes in which something was learnt, and at the end. What a
`paceline profile` measured meanwhile wins over what was learnt. Not handled: two programs of one side on one state
directory; the later one's stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError
from paceline.secret_files import private_folder, read_private, write_private
from paceline.workflow.profiling.learning import Demand, LearningProfiles

FILE: Final = "profiles.json"
FORMAT: Final = 1
SAVE_S: Final = 300.0

log = logging.getLogger("paceline.workflow")


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a profile holds under."""

    model: str  # the model's fingerprint
    embedder: str  # its name; "": none
    machine: str  # processor, cores and memory, and the GPU if it is used
    threads: int  # of the engine; 0: it uses none of this machine's
    units: str  # lanes, and threads of the host with their cores
    reranker: str  # its name; "": that of the embedder, if it is one


@dataclass(frozen=True, slots=True)
class StoredProfiles:
    """Content of a file. measured: when, as ISO 8601 in UTC; "": nothing was measured in advance."""

    conditions: Conditions
    profiles: LearningProfiles
    measured: str = ""
    notes: tuple[str, ...] = ()  # how it was measured, in sentences

    def encode(self) -> bytes:
        content = {
            "format": FORMAT,
            "conditions": asdict(self.conditions),
            "measured": self.measured,
            "notes": list(self.notes),
            "learnt": json.loads(self.profiles.to_json()),
        }
        return json.dumps(content, indent=1).encode()

    @staticmethod
    def decode(content: bytes, demand: Demand | None = None) -> StoredProfiles:
        """Raises ValueError for what `encode` did not write."""
        try:
            read = json.loads(content)
            if read["format"] != FORMAT:
                raise ValueError(f"format {read['format']}; this build reads {FORMAT}")
            known: Mapping[str, object] = read["conditions"]
            threads = known["threads"]
            if not isinstance(threads, int):
                raise ValueError("no number of threads")
            texts = (str(known[name]) for name in ("model", "embedder", "machine", "units", "reranker"))
            model, embedder, machine, units, reranker = texts
            conditions = Conditions(model, embedder, machine, threads, units, reranker)
            profiles = LearningProfiles.from_json(json.dumps(read["learnt"]), demand)
            notes = tuple(str(note) for note in read["notes"])
            return StoredProfiles(conditions, profiles, str(read["measured"]), notes)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a file of profiles ({error})") from error


@dataclass(slots=True)
class ProfileFile:
    """The file of a side. Its methods may be called on any thread, one at a time."""

    path: Path

    def read(self, demand: Demand | None = None) -> StoredProfiles | None:
        """None: there is none. Raises ConfigError for one that cannot be used."""
        content = read_private(self.path, otherwise="remove it")
        if content is None:
            return None
        try:
            return StoredProfiles.decode(content, demand)
        except ValueError as error:
            raise ConfigError(f"{self.path} is damaged ({error}): run `paceline profile` again.") from error

    def write(self, content: bytes) -> None:
        """Raises ConfigError for a folder or a disk that cannot be used."""
        try:
            private_folder(self.path.parent)
            write_private(self.path, content)
        except OSError as error:
            raise ConfigError(f"Profiles cannot be kept in {self.path}: {error.strerror}.") from error


class KeptProfiles:
    """Profiles of a running node; belongs to its event loop. shared: the engine computes on this host's processor, so
    that its lanes and the host's threads contend for one memory."""

    def __init__(self, state_dir: Path | None, conditions: Conditions, demand: Demand, *, shared: bool) -> None:
        """state_dir: None keeps nothing."""
        self.file = None if state_dir is None else ProfileFile(state_dir / FILE)
        self.conditions = conditions
        self.demand = demand
        self.shared = shared
        self._stored: StoredProfiles | None = None
        self._saved = 0  # revision

    def open(self) -> LearningProfiles:
        """What is known, read at the first call. A file that is damaged or of other conditions costs a line in the
        log, and learning begins anew."""
        if self._stored is None:
            self._stored = self._read() or StoredProfiles(self.conditions, LearningProfiles(demand=self.demand))
            self._saved = self._stored.profiles.revision
        return self._stored.profiles

    async def save(self) -> None:
        """Write what was learnt since. A disk that takes nothing costs a line in the log."""
        stored, file = self._stored, self.file
        if stored is None or file is None or stored.profiles.revision == self._saved:
            return
        newer = await asyncio.to_thread(self._read)
        if newer is not None and newer.measured > stored.measured:
            stored.profiles.adopt(newer.profiles)
            self._stored = stored = StoredProfiles(stored.conditions, stored.profiles, newer.measured, newer.notes)
        revision, content = stored.profiles.revision, stored.encode()
        try:
            await asyncio.to_thread(file.write, content)
        except ConfigError as error:
            log.warning("%s", error)
            return
        self._saved = revision

    def _read(self) -> StoredProfiles | None:
        if self.file is None:
            return None
        try:
            found = self.file.read(self.demand)
        except ConfigError as error:
            log.warning("%s What units take is learnt anew.", error)
            return None
        if found is not None and (other := difference(found.conditions, self.conditions)):
            log.warning("%s was measured with %s: what units take is learnt anew", self.file.path, other)
            return None
        return found


def difference(stored: Conditions, here: Conditions) -> str:
    """What differs, for people; "": nothing."""
    ours = asdict(here)
    return " and ".join(f"another {name}" for name, value in asdict(stored).items() if value != ours[name]).replace(
        "another threads", "another number of threads"
    )
