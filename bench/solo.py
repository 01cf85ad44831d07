"""One machine on a real engine, thread and event loop, without HTTP: how the ways of decoding are compared in one run.

The session is the program's own (`runtime.session`); a client is not there, so its tokens are only counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.sampling import SamplingParams
from paceline.core.segments import Segment
from paceline.engine.contract import Engine
from paceline.errors import PacelineError
from paceline.runtime.session import Session
from paceline.runtime.worker import EngineWorker
from paceline.strategies.machine import Branch, Emit, Finish, Machine, Retrieved, Started, Task

MachineFactory = Callable[[Task], Machine]


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0  # from the first token to the last: what reading the prompt takes is left out
    stats: Mapping[str, float] = field(default_factory=dict)

    @property
    def timed_tokens(self) -> int:
        """Tokens that `seconds` brought."""
        return max(0, len(self.tokens) - self.first)

    first: int = 0  # tokens that came together, first


class Solo(Session):
    """Runs one answer to its end."""

    def __init__(self, machine: Machine, worker: EngineWorker, prompt: Sequence[int], room: int) -> None:
        super().__init__(machine, worker)
        self.answer = Answer()
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._branch, self._room = Branch(tuple(prompt), None), room
        self._first: float | None = None

    def begin(self) -> None:
        self.deliver(Started(self._loop.time()))

    def retrieve(self) -> None:
        self.deliver(Retrieved((self._branch,), self._room))

    def emit(self, token: Emit) -> None:
        self.answer.tokens.append(token.token)
        if self._first is None:
            self._first = time.perf_counter()
            self.answer.first = 1

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        self.answer.seconds = 0.0 if self._first is None else time.perf_counter() - self._first
        self.answer.stats = finish.stats
        self.done.set_result(self.answer)

    def fail(self, error: PacelineError) -> None:
        super().fail(error)
        if not self.done.done():
            self.done.set_exception(error)

    def open(self, targets: tuple[int, ...], epoch: int) -> None:
        raise AssertionError(f"no peer takes part: {len(targets)}, {epoch}")

    def drop(self) -> None:
        raise AssertionError("no peer takes part")


def task(engine: Engine, sampling: SamplingParams, max_tokens: int, eos_ids: frozenset[int], vocab_size: int) -> Task:
    return Task("cloud", True, sampling, max_tokens, eos_ids, min(vocab_size, engine.info.vocab_size))


async def answers(
    worker: EngineWorker, make: Sequence[Callable[[], Machine]], prompts: Sequence[Sequence[int]], room: int
) -> list[Answer]:
    """As many at once as there are machines."""
    sessions = [Solo(each(), worker, prompt, room) for each, prompt in zip(make, prompts, strict=True)]
    for session in sessions:
        session.begin()
    return list(await asyncio.gather(*(session.done for session in sessions)))


__all__ = ["Answer", "Segment", "Solo", "answers", "task"]
