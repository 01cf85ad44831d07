"""A log of what machines are told and answer, one JSON object a line, which `python -m lab.replay` runs again.

A line `machine` has a machine's strategy and configuration, with the statistics and tables it reads; a line `stimulus`
an event and the machine's effects. Machines of one side share statistics: each object is written once, when it is first
met, and named by its number afterwards, so that a log of several answers replays them in the order in which they were.
Values are encoded by their type, which must be the package's; nothing of a line is ever called.

Not handled: changes of shared objects by others than machines (a table that is shrunk or erased), after which a replay
differs from the log.
"""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedWriter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import StepSize
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import Mask
from paceline.strategies.base import Effect, Event, FromDraftModel, Machine, MachineConfig, Sampled, Scored, Strategy

MAX_BYTES: Final = 256 << 20  # of a log, which then ends
FILE: Final = "machines.jsonl"
T = TypeVar("T")

_CODES: Final[dict[type, str]] = {
    tuple: "t",
    list: "l",
    set: "s",
    frozenset: "f",
    dict: "d",
    MappingProxyType: "m",
    Counter: "n",
    OrderedDict: "y",
}


def name_of(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def fields_of(value: object) -> dict[str, object]:
    """The attributes of an object, those in slots included, without caches."""
    kinds = type(value).__mro__
    names = [name for kind in kinds for name in (*kind.__dict__.get("__slots__", ()), *_struct_fields(kind))]
    found = {name: getattr(value, name) for name in names if name != "__weakref__" and hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return {name: each for name, each in found.items() if not (name == "memo" and isinstance(value, Dist))}


def _struct_fields(kind: type) -> tuple[str, ...]:
    return kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else ()


def _is_frozen(kind: type) -> bool:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.frozen
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


class Encoder:
    """Values as JSON. Mutable objects are numbered, and known again as long as this encoder lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, object]] = {}  # by id, with the object, so that the id stays its own

    def encode(self, value: Any) -> object:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in (tuple, list, set, frozenset):
            return {_CODES[kind]: [self.encode(each) for each in (sorted(value) if "set" in kind.__name__ else value)]}
        if kind in _CODES:
            return {_CODES[kind]: self._pairs(value)}
        if kind is deque:
            return {"q": [value.maxlen, [self.encode(each) for each in value]]}
        if kind is defaultdict:
            return {"z": [self.encode(value.default_factory), self._pairs(value)]}
        if kind is array:
            return {"w": [value.typecode, base64.b64encode(zlib.compress(value.tobytes(), 1)).decode()]}
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray):
            data = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 1)).decode()
            return {"a": [value.dtype.str, list(value.shape), data]}
        if isinstance(value, np.generic):
            return self.encode(value.item())
        if callable(value):
            is_named = "<" not in getattr(value, "__qualname__", "<") and not hasattr(value, "__self__")
            return {"c": name_of(value)} if is_named else {"lost": name_of(kind)}
        if isinstance(value, tuple):  # a named one
            return {"v": [name_of(kind), [self.encode(each) for each in value]]}
        number = None
        if not _is_frozen(kind):
            if id(value) in self._known:
                return {"r": self._known[id(value)][0]}
            number = len(self._known)
            self._known[id(value)] = number, value
        return {"o": [number, name_of(kind), {name: self.encode(each) for name, each in fields_of(value).items()}]}

    def _pairs(self, value: Mapping[object, object]) -> list[object]:
        return [[self.encode(key), self.encode(each)] for key, each in value.items()]


@dataclass(frozen=True, slots=True)
class ToldMask:
    """A mask whose answers are written down."""

    mask: Mask
    told: list[object]

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        return self._tell(self.mask.allowed(path))

    def complete(self, path: Sequence[int]) -> bool:
        return self._tell(self.mask.complete(path))

    def at_once(self, work: Callable[[], T]) -> T:
        return self.mask.at_once(work)

    def _tell(self, answer: T) -> T:
        self.told.append(Encoder().encode(answer))
        return answer


class StimulusLog:
    """Belongs to the event loop of a node."""

    def __init__(self, file: Path, *, text: bool) -> None:
        """file: replaced; its folder is private. text: with all that machines read and write, from which they can be
        run again; without it only kinds, numbers and times. Raises OSError where the file cannot be made."""
        file.unlink(missing_ok=True)
        self._file: BufferedWriter | None = file.open("xb")
        file.chmod(0o600)
        self.text = text
        self._shared = Encoder()
        self._machines = 0
        self._step: StepSize | None = None  # the last one
        self._steps = 0

    def step(self, step: StepSize) -> int:
        """The number of a step of the engine. Machines know by its object that it was one step for all of them."""
        if step is not self._step:
            self._step = step
            self._steps += 1
        return self._steps

    def machine(self, strategy: Strategy, config: MachineConfig) -> Machine:
        """The machine of this strategy, whose stimuli are logged from now on."""
        self._machines += 1
        number, told = self._machines, list[object]()
        line: dict[str, object] = {"machine": number, "strategy": strategy.name}
        if self.text:
            mask = config.output.mask
            plain = replace(config, output=replace(config.output, mask=None))
            line["config"], line["masked"] = self._shared.encode(plain), mask is not None
            if mask is not None:
                config = replace(config, output=replace(config.output, mask=ToldMask(mask, told)))
        self.write(line)
        return LoggedMachine(strategy.machine(config), number, told, self)

    def write(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            if self._file.tell() > MAX_BYTES:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._shared = None, Encoder()


class LoggedMachine:
    """A machine, and the log of what it is told."""

    def __init__(self, machine: Machine, number: int, told: list[object], log: StimulusLog) -> None:
        """told: answers of the mask, if it has one."""
        self._machine, self._number, self._told, self._log = machine, number, told, log
        self._read: list[object] = []  # distributions: number of the stimulus, place of the row, value
        self._count = 0

    def on(self, event: Event) -> Sequence[Effect]:
        line: dict[str, object] = {"stimulus": self._number, "event": type(event).__name__}
        seen = event
        if self._log.text:
            seen = with_reads(event, partial(self._reading, self._count))
            line["event"], line["later"] = Encoder().encode(with_reads(event, None)), places_of(event)
            if (answer := answer_in(event)) is not None:
                line["step"] = self._log.step(answer.step)
        else:
            line |= {name: getattr(event, name) for name in ("ticket", "now") if hasattr(event, name)}
        self._count += 1
        try:
            effects = self._machine.on(seen)
            told = Encoder().encode if self._log.text else lambda effect: type(effect).__name__
            line["effects"] = [told(effect) for effect in effects]
            return effects
        except Exception as error:
            line["error"] = type(error).__name__
            raise
        finally:
            if self._log.text:
                line["read"], line["masks"] = self._read, list(self._told)
            self._log.write(line)
            self._read = []
            self._told.clear()

    def stats(self) -> Mapping[str, float]:
        return self._machine.stats()

    def _reading(self, stimulus: int, place: int, dists: Callable[[], tuple[Dist, ...]]) -> tuple[Dist, ...]:
        found = dists()
        self._read.append([stimulus, place, Encoder().encode(found)])
        return found


Reading = Callable[[int, Callable[[], tuple[Dist, ...]]], tuple[Dist, ...]]


def answer_in(event: Event) -> Scored | Sampled | None:
    """The answer of an engine that the event is or has."""
    inner = event.answer if isinstance(event, FromDraftModel) else event
    return inner if isinstance(inner, Scored | Sampled) else None


def with_answer(event: Event, answer: Scored | Sampled) -> Event:
    """The event with another answer of the engine."""
    return FromDraftModel(answer) if isinstance(event, FromDraftModel) else answer


def places_of(event: Event) -> list[int]:
    """Places of the rows whose distributions may be read later."""
    answer = answer_in(event)
    return [p for p, row in enumerate(answer.rows) if row.dists is not None] if isinstance(answer, Sampled) else []


def with_reads(event: Event, read: Reading | None) -> Event:
    """The event, whose rows' distributions are read by `read`, which is told the row's place and how. None: as it is
    written, since what may be read later is not read for the log."""
    answer = answer_in(event)
    if not isinstance(answer, Sampled) or not places_of(event):
        return event
    rows = tuple(
        row
        if row.dists is None
        else msgspec.structs.replace(row, dists=None if read is None else partial(read, place, row.dists))
        for place, row in enumerate(answer.rows)
    )
    return with_answer(event, msgspec.structs.replace(answer, rows=rows))
