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
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

from paceline.engine.base import ModelInfo
from paceline.errors import ConfigError
from paceline.rag.embedder import DEFAULT
from paceline.secret_files import private_folder, read_private, write_private
from paceline.workflow.graph import WorkflowModels
from paceline.workflow.profiling import Demand, LearningProfiles

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


# The machine, in words that are equal where profiles of its units may be believed.


CPU_INFO: Final = Path("/proc/cpuinfo")


def describe_machine(gpu: str | None = None) -> str:
    """Processor, cores that this process may use, GiB of memory, and the GPU."""
    cores = len(os.sched_getaffinity(0))
    gib = round(psutil.virtual_memory().total / 2**30)
    return ", ".join(
        [f"{processor()}, {cores} core{'s' if cores > 1 else ''}, {gib} GiB", *([] if gpu is None else [gpu])]
    )


def processor() -> str:
    try:
        lines = CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return names[0] if names else platform.processor() or platform.machine()


# Bytes that a launch moves between memory and processor, estimated from sizes: nothing here is measured.
#
# A decoded token reads the weights once and the keys and values before it; a prompt reads the weights once a step.
# Caches of the processor are not counted, so small models ask for more than their memory sees. Where a size is not
# known (the fake engine, a search, other embedders than MiniLM), the launch counts for nothing: no slowdown is learnt
# of it.


NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MINILM_BYTES: Final = 90_852_864.0  # 22.7 million numbers of 4 bytes, read once for a batch
BATCH: Final = 16  # texts of a batch of the encoder
CONTEXT: Final = 256  # cached rows that a decoded token reads, as assumed


@dataclass(frozen=True, slots=True)
class LaunchBytes:
    """By operation, kind of unit and shape, as `LearningProfiles` asks."""

    weights: float  # bytes of the model; 0: unknown
    kv_row: float  # bytes of a row of keys and values
    step_rows: int  # rows of a prompt that a step computes
    encoder: float  # bytes of the embedder; 0: unknown
    models: WorkflowModels = field(default_factory=WorkflowModels)

    def __call__(self, operation: str, kind: str, shape: int) -> float:  # noqa: ARG002
        model, _, phase = operation.partition("/")
        if model in (self.models.embed, self.models.rerank):
            return self.encoder * math.ceil(shape / BATCH)
        if model not in (self.models.agent, self.models.chat) or not self.weights:
            return 0.0
        if phase == "prefill":
            return math.ceil(shape / self.step_rows) * self.weights + shape * self.kv_row
        return shape * (self.weights + CONTEXT * self.kv_row)


def launch_bytes(info: ModelInfo, step_rows: int, embedder: str | None) -> LaunchBytes:
    """embedder: its name; None: this side has none."""
    number = NUMBER_BYTES.get(info.dtype, 4)
    shape = info.shape
    row = 0.0 if shape is None else 2.0 * shape.layers * shape.hidden * shape.kv_share * number
    encoder = MINILM_BYTES if embedder == DEFAULT else 0.0
    return LaunchBytes(float(info.num_weights * number), row, step_rows, encoder)
