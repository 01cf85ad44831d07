"""One machine on a real engine, thread and event loop, without HTTP, to compare decoding methods in one run.

The session is the program's own (`runtime.sessions.base`); without a client its tokens are only collected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.sessions.base import Session
from paceline.strategies.base import Branch, Emit, Finish, Machine, Retrieved, Started


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0  # from the first token to the end, without the prefill
    stats: Mapping[str, float] = field(default_factory=dict)

    @property
    def timed(self) -> int:
        """Tokens generated within `seconds`: all but the first."""
        return max(0, len(self.tokens) - 1)


class LocalSession(Session):
    """Session of one answer without a client or a peer."""

    def __init__(
        self, machine: Machine, worker: EngineWorker, prompt: Sequence[int], max_new_tokens: int | None
    ) -> None:
        super().__init__(machine, worker, None, client=self)
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer = Answer()
        self._retrieved = Retrieved((Branch(tuple(prompt), None),), max_new_tokens)
        self._first_token_at: float | None = None

    def begin(self) -> None:
        self.deliver(Started(self._loop.time()))

    def retrieve(self) -> None:
        self.deliver(self._retrieved)

    def emit(self, token: Emit) -> None:
        self._answer.tokens.append(token.token)
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        if self._first_token_at is not None:
            self._answer.seconds = time.perf_counter() - self._first_token_at
        self._answer.stats = finish.stats
        self.done.set_result(self._answer)

    def fail(self, error: PacelineError) -> None:
        super().fail(error)
        if not self.done.done():
            self.done.set_exception(error)

    def open_peer(self, targets: tuple[int, ...], epoch: int) -> None:
        raise AssertionError(f"no peer takes part: {len(targets)}, {epoch}")

    def pass_over(self, reason: str) -> None:
        raise AssertionError(f"no peer takes part: {reason}")

    def close_peer(self, fault: str) -> None:
        raise AssertionError(f"no peer takes part: {fault}")


async def together(
    worker: EngineWorker, machines: Sequence[Callable[[], Machine]], prompts: Sequence[Sequence[int]]
) -> list[Answer]:
    """Run all machines concurrently, one answer each."""
    sessions = []
    for make, prompt in zip(machines, prompts, strict=True):
        max_new_tokens = worker.steps.engine.info.max_positions - len(prompt)
        sessions.append(LocalSession(make(), worker, prompt, max_new_tokens))
    for session in sessions:
        session.begin()
    return list(await asyncio.gather(*(session.done for session in sessions)))
