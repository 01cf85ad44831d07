"""A log of machines run again: `python -m lab.replay FILE`.

FILE is the `machines.jsonl` of a state directory, written by a program with `--log-level debug` and `--log-text`
(`paceline/runtime/stimuli.py`). Prints every effect and ends with 1 if any differs from the one that was logged, with 2
for a log that cannot be run again. So a fault in production becomes a test.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import json
import sys
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import StepSize
from paceline.core.sampling.dist import Dist
from paceline.runtime.stimuli import Encoder, answer_in, with_answer
from paceline.strategies.base import Effect, Event, Machine, MachineConfig, Sampled
from paceline.strategies.registry import STRATEGIES

SAFE: Final = {"bool", "dict", "float", "int", "list", "set", "str", "tuple"}  # builtins that a line may name
T = TypeVar("T")


class NotReplayableError(Exception):
    """The log has not what is needed to run it again."""


def named(name: str) -> Any:
    """A type or function of the package. Raises NotReplayableError for any other."""
    module, _, path = name.partition(":")
    if module == "builtins" and path in SAFE:
        return getattr(builtins, path)
    if not module.startswith("paceline."):
        raise NotReplayableError(f"{name} is not of the package")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


class Decoder:
    """Values from the JSON of an `Encoder`. Calls nothing that a line names but the constructors of named tuples and of
    messages."""

    def __init__(self) -> None:
        self._known: dict[int, object] = {}

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((code, given),) = value.items()
        match code:
            case "float":
                return float(given)
            case "t" | "l" | "s" | "f":
                return {"t": tuple, "l": list, "s": set, "f": frozenset}[code](map(self.decode, given))
            case "d" | "m" | "n" | "y":
                pairs = dict(self._pairs(given))
                return {"d": dict, "m": MappingProxyType, "n": Counter, "y": OrderedDict}[code](pairs)
            case "q":
                return deque(map(self.decode, given[1]), given[0])
            case "z":
                return defaultdict(self.decode(given[0]), dict(self._pairs(given[1])))
            case "b":
                return base64.b64decode(given)
            case "a":
                kind, shape, data = given
                return np.frombuffer(zlib.decompress(base64.b64decode(data)), kind).reshape(shape).copy()
            case "w":
                kind, data = given
                return array(kind, zlib.decompress(base64.b64decode(data)))
            case "c":
                return named(given)
            case "lost":
                return partial(_lost, given)
            case "v":
                return named(given[0])(*map(self.decode, given[1]))
            case "r":
                return self._known[given]
            case "o":
                return self._object(*given)
        raise NotReplayableError(f"{code} is no code of a value")

    def _pairs(self, given: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        return ((self.decode(key), self.decode(each)) for key, each in given)

    def _object(self, number: int | None, name: str, fields: Mapping[str, Any]) -> object:
        kind = named(name)
        if issubclass(kind, msgspec.Struct) and number is None:
            return kind(**{field: self.decode(value) for field, value in fields.items()})
        made = kind.__new__(kind)
        if number is not None:
            self._known[number] = made
        for field, value in fields.items():
            object.__setattr__(made, field, self.decode(value))
        if isinstance(made, Dist):
            object.__setattr__(made, "memo", {})
        return made


def _lost(name: str, *_: object) -> None:
    raise NotReplayableError(f"it calls a {name}, which the log does not have")


class ToldMask:
    """A mask that answers as the log says."""

    def __init__(self, answers: deque[Any]) -> None:
        self._answers = answers

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:  # noqa: ARG002
        return self._next()  # type: ignore[no-any-return]

    def complete(self, path: Sequence[int]) -> bool:  # noqa: ARG002
        return self._next()  # type: ignore[no-any-return]

    def at_once(self, work: Callable[[], T]) -> T:
        return work()

    def _next(self) -> Any:
        if not self._answers:
            raise NotReplayableError("it asks for a mask that was not asked for")
        return Decoder().decode(self._answers.popleft())


class Replay:
    """The machines of one log."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._lines = lines
        self._shared = Decoder()
        self._machines: dict[int, Machine] = {}
        self._masks: dict[int, deque[Any]] = {}
        self._counts: Counter[int] = Counter()
        self._steps: dict[int, StepSize] = {}  # machines know by its object that a step was one for all of them
        self._reads = {
            (line["stimulus"], stimulus, place): dists
            for line in lines
            for stimulus, place, dists in line.get("read", ())
        }

    def run(self) -> Iterator[tuple[int, Event, list[object], list[object]]]:
        """Run each stimulus: its machine, the event, its effects now and as logged, an error in place of all effects.
        Raises NotReplayableError."""
        for line in self._lines:
            if "machine" in line:
                self._begin(line)
            else:
                yield self._stimulus(line)

    def _begin(self, line: Mapping[str, Any]) -> None:
        if "config" not in line:
            raise NotReplayableError("it was written without text: have the program run with --log-text")
        number, masks = line["machine"], deque[Any]()
        config: MachineConfig = self._shared.decode(line["config"])
        mask = ToldMask(masks) if line["masked"] else None
        config = replace(config, output=replace(config.output, mask=mask))
        self._machines[number], self._masks[number] = STRATEGIES[line["strategy"]].machine(config), masks

    def _stimulus(self, line: Mapping[str, Any]) -> tuple[int, Event, list[object], list[object]]:
        number = line["stimulus"]
        stimulus = self._counts[number]
        self._counts[number] += 1
        event = self._event(line, number, stimulus)
        self._masks[number].extend(line["masks"])
        try:
            effects: Sequence[Effect] = self._machines[number].on(event)
            now = [Encoder().encode(effect) for effect in effects]
        except NotReplayableError:
            raise
        except Exception as error:
            now = [type(error).__name__]
        return number, event, now, line.get("effects") or ([line["error"]] if "error" in line else [])

    def _event(self, line: Mapping[str, Any], number: int, stimulus: int) -> Event:
        event: Event = Decoder().decode(line["event"])
        answer = answer_in(event)
        if answer is None:
            return event
        answer = msgspec.structs.replace(answer, step=self._steps.setdefault(line["step"], answer.step))
        if isinstance(answer, Sampled) and line["later"]:
            rows = list(answer.rows)
            for place in line["later"]:
                rows[place] = msgspec.structs.replace(rows[place], dists=partial(self._read, number, stimulus, place))
            answer = msgspec.structs.replace(answer, rows=tuple(rows))
        return with_answer(event, answer)

    def _read(self, number: int, stimulus: int, place: int) -> tuple[Dist, ...]:
        try:
            return Decoder().decode(self._reads[number, stimulus, place])  # type: ignore[no-any-return]
        except KeyError:
            raise NotReplayableError("it reads distributions that were not read") from None


def replayed(file: Path, write: Callable[[str], object]) -> int:
    """Run a log again and write its effects. Returns how many stimuli had others. Raises NotReplayableError."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    differing = 0
    for number, event, now, logged in Replay(lines).run():
        same = json.loads(msgspec.json.encode(now)) == logged
        differing += not same
        write(f"{number:4} {type(event).__name__:12} {'=' if same else '!'} {json.dumps(now)[:400]}\n")
        if not same:
            write(f"     logged         {json.dumps(logged)[:400]}\n")
    return differing


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lab.replay FILE")
    try:
        differing = replayed(Path(sys.argv[1]), sys.stdout.write)
    except NotReplayableError as error:
        sys.stderr.write(f"lab.replay: the log cannot be run again: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"{differing} stimuli with other effects\n" if differing else "the same effects\n")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
