"""The stages of one pipeline as their head sees them: started, where they are processes of this machine, dialled, told
their layers, put in a row.

A member that has loaded the same layers as another, or none, is a spare. Runs on the pipeline's loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import msgspec

from paceline.errors import ConfigError, LinkClosed, PacelineError
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link.connection import Authenticator
from paceline.runtime.stages.links import StageLink, dial_stage
from paceline.settings import PREFIX
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Bulk, Claim, Signer
from paceline.wire.messages import KEY_BYTES, Frame
from paceline.wire.stages import messages
from paceline.wire.stages.messages import About, RowFormat, StageCost

log = logging.getLogger("paceline.stages")
A = TypeVar("A", bound=Frame)

STANDING_S = 1.0  # between looks whether members may stay
DESCRIBE_S = 120.0  # it may have to measure
LOAD_S = 600.0
ASSIGN_S = 10.0
READY = "paceline stage: listening on "  # how a stage's line about its address begins
CREDENTIAL = ("--credential", "-")
START_S = 120.0
PAUSES_S = (0.0, 1.0, 3.0, 10.0, 30.0)  # before a start, by how many have failed one after the other
STOP_S = 10.0  # a process with torch takes seconds to end


NOTHING = About(0, "", "", 1, 0, 0, 0, 0, 0, 1, 0, 0, None)  # before a stage has said what it is
Span = tuple[int, int]  # layers: the first, and that behind the last
Standing = Callable[[str, bytes], Awaitable[CloseCode | None]]  # of a name and its key: why it may not stay


class Place:
    """Where a stage is to be found: an address."""

    is_started_here = False  # it can be started again
    failed = 0  # starts of its process, one after the other

    def __init__(self, where: str) -> None:
        self._where = where

    def __str__(self) -> str:
        return self._where

    async def address(self) -> str:
        """HOST:PORT; starts its process if that does not run. Raises LinkClosed."""
        return self._where

    async def stop(self) -> None:
        """End its process, if it was started here."""

    async def kill(self) -> None:
        """The same at once: it does not answer."""


class StageCredential(msgspec.Struct, frozen=True):
    """A stage's proof that it may be let in: its name, its key's seed, and its head's key. In JSON, bytes as base64."""

    name: str
    seed: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    head_key: bytes

    @property
    def key(self) -> PrivateKey:
        return PrivateKey(self.seed)

    def __repr__(self) -> str:
        return f"StageCredential({self.name!r})"


class LocalPlace(Place):
    """A stage of this machine, whose process is started when its address is asked for and it does not run.

    It has a key of its own, made for one process and passed to it over its standard input; the process ends when that
    is closed, so none outlives its head.
    """

    is_started_here = True

    def __init__(
        self,
        name: str,
        head_key: bytes,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        model: Path | None = None,
    ) -> None:
        """arguments: of `paceline stage`. environment: besides this process's. model: the folder that it will read;
        where that is gone, no process is started to find out."""
        super().__init__(name)
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self._head_key = head_key
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._key = PrivateKey.generate()
        self._reading: asyncio.Task[None] | None = None
        self._model = model

    def admits(self, claim: Claim) -> bytes | CloseCode:
        return self._key.public_key if claim.proves(self._key.public_key) else CloseCode.BAD_CREDENTIAL

    async def address(self) -> str:
        if self.process is None or self.process.returncode is not None:
            await asyncio.sleep(PAUSES_S[min(self.failed, len(PAUSES_S) - 1)])
            try:
                await self._start()
            except LinkClosed:
                self.failed += 1
                raise
            self.failed = 0
        return self._where

    async def _start(self) -> None:
        if self._model is not None and not (self._model / "config.json").is_file():
            raise LinkClosed(f"{self.name} could not be started: there is no model in {self._model} any more")
        self._key = PrivateKey.generate()
        # What is set for stages elsewhere, or for the head, is not for this one.
        command = (sys.executable, "-m", "paceline", "stage", *self._arguments, "--config", os.devnull, *CREDENTIAL)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        process = self.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | self._environment,
            start_new_session=True,  # Ctrl-C reaches the head alone, which then ends its stages
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            credential = StageCredential(self.name, self._key.seed, self._head_key)
            process.stdin.write(msgspec.json.encode(credential) + b"\n")
            with suppress(ConnectionError):  # it has ended already: its code says more
                await process.stdin.drain()
            async with asyncio.timeout(START_S):
                while line := (await process.stdout.readline()).decode("utf-8", "replace"):
                    if line.startswith(READY):
                        self._where = line.removeprefix(READY).strip()
                        self._reading = asyncio.create_task(_pass_on(process.stdout))
                        return
        except (OSError, TimeoutError) as error:
            process.kill()
            raise LinkClosed(f"{self.name} could not be started: {str(error) or 'it took too long'}") from error
        code = await process.wait()
        raise LinkClosed(f"{self.name} could not be started: its process ended with code {code}; this log says why")

    async def stop(self) -> None:
        """End the process by closing its input; kill it if that is not enough."""
        process = self.process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        await self.kill()

    async def kill(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        process = self.process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _pass_on(output: asyncio.StreamReader) -> None:
    while line := await output.readline():
        log.info("%s", line.decode("utf-8", "replace").rstrip())


@dataclass(slots=True, eq=False)
class Member:
    place: Place
    link: StageLink | None = None
    key: bytes = b""
    name: str = ""
    address: str = ""
    about: About = NOTHING
    is_mute: bool = False  # its last connection ended because nothing was heard
    answers: dict[int, asyncio.Future[Frame]] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self.link is not None and self.link.is_open

    @property
    def span(self) -> Span | None:
        """Layers it has loaded."""
        return None if self.about.first == self.about.stop else (self.about.first, self.about.stop)

    async def ask(self, message: messages.Numbered, seconds: float, kind: type[A]) -> A:
        """The answer to a request, of this kind. Raises LinkClosed for a stage that is lost meanwhile, fails, takes too
        long, or answers something else."""
        if self.link is None or not self.link.is_open:
            raise LinkClosed(f"the stage at {self.place} is gone")
        answer = self.answers[message.request] = asyncio.get_running_loop().create_future()
        try:
            self.link.send(message)
            async with asyncio.timeout(seconds):
                found: Frame = await answer
        except TimeoutError:
            raise LinkClosed(f"the stage at {self.place} did not answer within {seconds:.0f} s") from None
        finally:
            self.answers.pop(message.request, None)
        if isinstance(found, messages.RequestFailed):
            raise LinkClosed(f"the stage at {self.place} failed: {found.reason}")
        if not isinstance(found, kind):
            raise LinkClosed(f"the stage at {self.place} answered something else")
        return found

    def heard(self, message: Frame) -> bool:
        """True if it answers a request of `ask`."""
        answer = self.answers.get(message.request) if isinstance(message, messages.Numbered) else None
        if answer is None:
            return False
        if not answer.done():
            answer.set_result(message)
        return True

    def lost(self, reason: str) -> None:
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(LinkClosed(f"the stage at {self.place} is gone: {reason}"))
        self.link = None


class Members:
    """`heard` and `lost` are called on the loop: with a member's messages; with its end in words, and the seconds since
    it was heard."""

    def __init__(
        self,
        places: Sequence[Place],
        *,
        key: Signer,
        admit: Authenticator,
        fingerprint: str,
        format: RowFormat | None,
        heard: Callable[[Member, Frame | Bulk], None],
        lost: Callable[[Member, str, float], None],
        standing: Standing | None = None,
    ) -> None:
        """fingerprint: of the model that the head serves. format: of hidden rows; None: the model's own. standing: of
        members that were not started here; None: whoever was let in may stay."""
        self.members = [Member(place) for place in places]
        self.order: list[Member] = []  # the pipeline, first stage first
        self.spans: list[Span] = []  # their layers
        self._key, self._admit = key, admit
        self._fingerprint, self._format = fingerprint, format
        self._heard, self._lost, self._standing = heard, lost, standing
        self._kind: tuple[str, int, int] | None = None  # number format, block size, and vocabulary of the row
        self._numbers = count(1, 2)  # of requests: odd, so that they are none of the engine's
        self.epoch = 0
        self.is_hopeful = False  # a lost stage is being started here, or its layers are loaded elsewhere

    @property
    def abouts(self) -> list[About]:
        """Of the pipeline's stages, first stage first."""
        return [member.about for member in self.order]

    # ---- connecting -------------------------------------------------------------------------------------------------
    async def connect(self, member: Member, *, measured: bool = False) -> None:
        """measured: the stage is to measure what layers cost, unless it was told its own. Raises LinkClosed."""
        if member.is_up:
            return
        if member.is_mute:
            await member.place.kill()
            member.is_mute = False
        address = await member.place.address()
        try:
            link = await dial_stage(
                address,
                self._key,
                "head",
                self._admit,
                received=partial(self._received, member),
                on_down=partial(self._gone, member),
            )
        except LinkClosed:
            await member.place.kill()  # it runs and does not answer: the next attempt starts another
            raise
        member.link, (member.name, member.key), member.address = link, link.stage, address
        member.about = await member.ask(messages.Describe(next(self._numbers), measured), DESCRIBE_S, About)
        self._check(member)

    def _received(self, member: Member, link: StageLink, message: Frame | Bulk) -> None:
        if member.link is link and (isinstance(message, Bulk) or not member.heard(message)):
            self._heard(member, message)

    def _gone(self, member: Member, link: StageLink) -> None:
        if member.link is link:
            member.is_mute = link.close_code == CloseCode.HEARTBEAT_LOST
            member.lost(link.reason)
            self._lost(member, link.reason, link.silence_s)

    def _check(self, member: Member) -> None:
        """Texts depend on the model and its number format, and the memory that is counted on the size of blocks."""
        about = member.about
        if about.model != self._fingerprint:
            self._refuse(member, "another model")
        if self._kind is not None and member.span is not None and _kind_of(about) != self._kind:
            own = f"numbers in {about.dtype} and blocks of {about.block_size} rows"
            self._refuse(member, f"{own}, the others have {self._kind[0]} and {self._kind[1]}")

    def _refuse(self, member: Member, what: str) -> NoReturn:
        if member.link is not None:
            member.link.break_off()
        raise LinkClosed(f"the stage at {member.place} has {what}")

    # ---- the row ----------------------------------------------------------------------------------------------------
    async def begin(self) -> None:
        """Connect to all, plan, load and link. Raises ConfigError."""
        try:
            found = await asyncio.gather(
                *(self.connect(member, measured=True) for member in self.members), return_exceptions=True
            )
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            if all(member.span is None for member in self.members):
                await self._load_planned()
            self.order = self._row()
            self.spans = [member.span for member in self.order if member.span is not None]
            self._kind, *others = {_kind_of(about) for about in self.abouts}
            if others:
                raise ConfigError("The stages of a pipeline must have one number format and block size.")
            await self.link()
        except LinkClosed as error:
            raise ConfigError(f"The stages cannot be used: {error}.") from error

    async def _load_planned(self) -> None:
        costs = [member.about.cost for member in self.members if member.about.cost is not None]
        if len(costs) < len(self.members):
            raise LinkClosed("a stage has not measured its speed")
        layers, here = self.members[0].about.layers, sum(member.place.is_started_here for member in self.members)
        costs = [  # those of this machine share its memory
            msgspec.structs.replace(cost, free_bytes=cost.free_bytes // here) if member.place.is_started_here else cost
            for member, cost in zip(self.members, costs, strict=True)
        ]
        plan = plan_spans(layers, costs)
        for number, (cost, span) in enumerate(zip(costs, plan, strict=True), 1):
            seconds, num_bytes = span_cost(cost, *span, layers)
            told = "stage %d: layers %d:%d, %.2f ms a row, %d MiB of weights"
            log.info(told, number, *span, seconds * 1e3, _mib(num_bytes))
        await asyncio.gather(*(self.load(*pair) for pair in zip(self.members, plan, strict=True)))

    async def load(self, member: Member, span: Span) -> None:
        member.about = await member.ask(messages.LoadSpan(next(self._numbers), *span), LOAD_S, About)
        self._check(member)

    def _row(self) -> list[Member]:
        """Members that have all layers, in order. Raises ConfigError."""
        by_first: dict[int, Member] = {}
        for member in self.members:
            if member.span is not None:
                by_first.setdefault(member.about.first, member)
        row: list[Member] = []
        reached = 0
        while reached in by_first:
            row.append(by_first[reached])
            reached = row[-1].about.stop
        layers = row[0].about.layers if row else 0
        if not row or reached != layers:
            spans = ", ".join(f"{m.span[0]}:{m.span[1]}" for m in self.members if m.span is not None) or "none"
            raise ConfigError(
                f"The stages do not have all {layers or ''} layers of the model: they have {spans}. Each stage must "
                "begin where another ends, from layer 0 to the last."
            )
        return row

    async def link(self) -> None:
        """Assign their places to all. Every stage is empty afterwards. Raises LinkClosed."""
        self.epoch += 1
        requests = []
        for before, member, behind in zip([None, *self.order], self.order, [*self.order[1:], None], strict=False):
            message = messages.Assign(
                next(self._numbers),
                self.epoch,
                self.format,
                None if before is None else before.key,
                None if behind is None else behind.address,
                None if behind is None else behind.key,
            )
            requests.append(member.ask(message, ASSIGN_S, messages.RequestDone))
        jobs = [asyncio.ensure_future(request) for request in requests]
        try:
            await asyncio.gather(*jobs)
        finally:  # when one is lost, nobody waits for its neighbours
            self.is_hopeful = False
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    @property
    def format(self) -> RowFormat:
        dtype = self.order[0].about.dtype
        return self._format or (dtype if dtype in messages.ROW_FORMATS else "float32")

    async def replace_lost(self) -> None:
        """Connect again to lost members of the row, or put spares in their place. Raises LinkClosed."""
        for place, (member, span) in enumerate(zip(self.order, self.spans, strict=True)):
            if member.is_up and member.span == span:
                continue
            found = member if member.is_up else self._spare(span) or member
            try:
                self.is_hopeful |= found.place.is_started_here and not found.place.failed
                await self.connect(found)
                if found.span != span:
                    self.is_hopeful = True
                    await self.load(found, span)
                self._check(found)
            except PacelineError as error:
                self.is_hopeful = False
                raise LinkClosed(
                    f"stage {place + 1} of {len(self.order)}, layers {span[0]}:{span[1]}: {error}"
                ) from error
            if found is not member:
                log.warning("the stage at %s takes the place of that at %s", found.place, member.place)
            self.order[place] = found

    def _spare(self, span: Span) -> Member | None:
        """One that has loaded these layers, else one that has loaded none."""
        free = [member for member in self.members if member.is_up and member not in self.order]
        same = [member for member in free if member.span == span]
        none = [member for member in free if member.span is None]
        return next(iter(same + none), None)

    async def watch(self) -> None:
        """Break the links of members whose keys hold no longer. Until cancelled."""
        while self._standing is not None:
            await asyncio.sleep(STANDING_S)
            for member in self.members:
                link = member.link
                if link is None or member.place.is_started_here:
                    continue
                refusal = await self._standing(member.name, member.key)
                if refusal is not None:
                    link.break_off(code=refusal)

    async def close(self) -> None:
        await asyncio.gather(*(member.link.close() for member in self.members if member.link is not None))
        await asyncio.gather(*(member.place.stop() for member in self.members))


def _kind_of(about: About) -> tuple[str, int, int]:
    return about.dtype, about.block_size, about.vocab_size


def plan_spans(layers: int, costs: Sequence[StageCost]) -> list[Span]:
    """A span of at least one layer for every stage, in their order. Raises ConfigError with a sentence if there is
    none.

    The slowest stage sets the pace of a pipeline that is kept full, so its time is the least that there can be; of
    plans with that time, this is the one whose sum is least. Links between stages are not weighed.
    """
    if not 1 <= len(costs) <= layers:
        raise ConfigError(
            f"{len(costs)} stages cannot share {layers} layers: each stage needs at least one, so give 1 to {layers} "
            "stages."
        )
    best: dict[int, tuple[float, float, list[Span]]] = {0: (0.0, 0.0, [])}  # by layers: longest time, sum, spans
    for left, cost in zip(range(len(costs) - 1, -1, -1), costs, strict=True):
        after: dict[int, tuple[float, float, list[Span]]] = {}
        for first, (longest, total, spans) in best.items():
            for stop in [layers] if not left else range(first + 1, layers - left + 1):
                seconds, num_bytes = span_cost(cost, first, stop, layers)
                found = max(longest, seconds), total + seconds, [*spans, (first, stop)]
                if num_bytes <= cost.free_bytes and (stop not in after or found[:2] < after[stop][:2]):
                    after[stop] = found
        best = after
    if layers not in best:
        needed = layers * costs[0].layer_bytes + costs[0].embedding_bytes + costs[0].head_bytes
        raise ConfigError(
            f"The model's weights take {_mib(needed)} MiB and do not fit: {len(costs)} stages have "
            f"{_mib(sum(cost.free_bytes for cost in costs))} MiB free together. Add a stage, or free memory."
        )
    return best[layers][2]


def span_cost(cost: StageCost, first: int, stop: int, layers: int) -> tuple[float, int]:
    """Seconds of a row, and bytes of weights. layers: of the whole model."""
    seconds, num_bytes = (stop - first) * cost.layer_s, (stop - first) * cost.layer_bytes
    num_bytes += cost.embedding_bytes if first == 0 else 0
    return (seconds + cost.head_s, num_bytes + cost.head_bytes) if stop == layers else (seconds, num_bytes)


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
