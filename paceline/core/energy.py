"""Energy of engine steps and of messages: joules with their origin, meters of steps, and the share of each answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:  # settings name meters, and need no numpy for it
    from paceline.core.batching.segment import Segment
    from paceline.core.offloading import ModelShape

# Values of energy: joules with where they come from, what a machine is told, and what an answer has used.


MeterName = Literal["auto", "rapl", "nvml", "battery", "power", "workload", "off"]


class Energy(NamedTuple):
    joules: float = 0.0
    measured: bool = True  # False: some of it follows from powers that somebody has stated

    def plus(self, other: Energy) -> Energy:
        return Energy(self.joules + other.joules, self.measured and other.measured)

    def share(self, rows: int, of: int) -> Energy:
        """The part of so many rows of a forward."""
        return Energy(self.joules * rows / of, self.measured) if of else Energy(0.0, self.measured)

    @property
    def source(self) -> str:
        return "measured" if self.measured else "modelled"


class Spent(NamedTuple):
    """Joules of one answer at this side since its machine was told last; None: not known here."""

    computed: float | None = None  # by the forward that is answered, its share of a batch
    sent: float | None = None  # by sending messages to the peer
    num_bytes: int = 0  # of these messages


NONE: Final = Energy()
NOT_KNOWN: Final = Spent()


class EnergyUse(NamedTuple):
    """The energy that an answer has used at one side."""

    meter: str
    computed: Energy  # by forwards, those of the prompt included
    sent: Energy

    @property
    def joules(self) -> float:
        return self.computed.joules + self.sent.joules


# The account of one answer at one side: its shares of forwards, and what its messages took to send.


class AnswerEnergy:
    """Sending is modelled: the power of the radio for as long as the bytes take at the link's measured bandwidth.

    Not counted: receiving, and what is computed or sent after the answer's end for an answer that was cancelled.
    """

    def __init__(self, meter: str, send_w: float) -> None:
        """meter: name of the meter of the engine's steps; empty: there is none. send_w: power while sending, W."""
        self._meter, self._send_w = meter, send_w
        self._computed = Energy()
        self._sent = Energy(0.0, measured=False)
        self._untold = 0.0, 0  # joules and bytes that the machine does not know of

    def compute(self, energy: Energy) -> Spent:
        """Count a forward: what the machine is told with its answer."""
        if not self._meter:
            return NOT_KNOWN
        self._computed = self._computed.plus(energy)
        (sent, num_bytes), self._untold = self._untold, (0.0, 0)
        return Spent(energy.joules, sent, num_bytes)

    def send(self, num_bytes: int, bandwidth: float | None) -> None:
        """Count a message. bandwidth: bytes a second; None: no limit is known, and sending takes no time."""
        joules = self._send_w * num_bytes / bandwidth if bandwidth else 0.0
        self._sent = Energy(self._sent.joules + joules, measured=False)
        self._untold = self._untold[0] + joules, self._untold[1] + num_bytes

    @property
    def use(self) -> EnergyUse | None:
        """All of it so far; None without a meter."""
        return EnergyUse(self._meter, self._computed, self._sent) if self._meter else None


# Meters of engine steps: from counters, from power, from the model's operations; and one behind another.
#
# No I/O and no clock of their own: counters, powers and clocks are passed in. A meter belongs to the thread that runs
# the engine. What else the machine does meanwhile is part of what a measuring one shows.


class MeterUnreadable(Exception):
    """A meter has no value now. The text says why, as the end of a sentence."""


class StepMeter(Protocol):
    """Joules of an engine's steps, one after another. Steps that overlap share the time between two ends."""

    @property
    def name(self) -> str: ...

    def begin(self) -> None:
        """A step begins on an engine that was idle. Raises MeterUnreadable."""

    def end(self, segments: Sequence[Segment]) -> Energy:
        """The oldest step, which computed these segments, has ended; the next one may have begun. Raises
        MeterUnreadable."""


# ---- counters -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class MeterReading:
    """A counter of energy, J. It begins anew after `span`; infinite: it never does."""

    joules: float
    span: float = math.inf

    def since(self, earlier: MeterReading) -> float:
        """Joules between two readings no more than one span apart. Raises MeterUnreadable for a counter that was set
        back."""
        passed = self.joules - earlier.joules
        if passed >= 0.0:
            return passed
        if math.isinf(self.span) or passed + self.span < 0.0:
            raise MeterUnreadable("its counter was set back")
        return passed + self.span


class CounterMeter:
    """Counters of the hardware, all of them added.

    A counter that the hardware refreshes less often than a step takes gives nothing for some steps and more for others:
    right over many steps, not for one.
    """

    def __init__(self, name: str, read: Callable[[], Sequence[MeterReading]]) -> None:
        """read: the counters, always the same ones in the same order. Raises MeterUnreadable."""
        self.name = name
        self._read = read
        self._last: Sequence[MeterReading] = ()

    def begin(self) -> None:
        self._last = self._read()

    def end(self, segments: Sequence[Segment]) -> Energy:  # noqa: ARG002  # a meter's signature
        last, self._last = self._last, self._read()
        if not last:
            raise MeterUnreadable("it was not read when the step began")
        return Energy(sum(now.since(then) for now, then in zip(self._last, last, strict=True)))


# ---- power ----------------------------------------------------------------------------------------------------------
class PowerMeter:
    """Power x seconds of the step."""

    def __init__(self, name: str, watts: Callable[[], float], clock: Callable[[], float], *, measured: bool) -> None:
        """watts: at this moment; raises MeterUnreadable. clock: s, any origin. measured: the power is."""
        self.name = name
        self._watts, self._clock, self._measured = watts, clock, measured
        self._begun: float | None = None

    def begin(self) -> None:
        self._begun = self._clock()

    def end(self, segments: Sequence[Segment]) -> Energy:  # noqa: ARG002  # a meter's signature
        begun, self._begun = self._begun, self._clock()
        seconds = 0.0 if begun is None else max(0.0, self._begun - begun)
        return Energy(self._watts() * seconds, self._measured)


# ---- operations -----------------------------------------------------------------------------------------------------
class WorkloadMeter:
    """The step's operations (GELATO eq. 1) at a stated speed and power. Rows cost alike, batched or not.

    The output head, where the shape has one, is counted for the rows whose distributions are wanted alone.
    """

    def __init__(self, name: str, shape: ModelShape, *, flops_per_s: float, watts: float) -> None:
        self.name = name
        self._body, self._head = replace(shape, vocab=0), 2.0 * shape.hidden * shape.vocab
        self._joules_per_flop = watts / flops_per_s

    def begin(self) -> None:
        """Nothing is read."""

    def end(self, segments: Sequence[Segment]) -> Energy:
        flops = sum(
            self._body.flops(len(each.tokens), each.start) + self._head * len(each.logits_rows()) for each in segments
        )
        return Energy(flops * self._joules_per_flop, measured=False)


# ---- one behind another ---------------------------------------------------------------------------------------------
class MeterWithSubstitute:
    """A meter, and one that stands in for the steps which it cannot measure."""

    def __init__(self, meter: StepMeter, substitute: StepMeter, failed: Callable[[str], None]) -> None:
        """substitute: never raises. failed: called with the reason when the meter ceases to work, not for each step."""
        self.name = meter.name
        self._meter, self._substitute, self._failed = meter, substitute, failed
        self._works = True

    def begin(self) -> None:
        self._substitute.begin()
        try:
            self._meter.begin()
        except MeterUnreadable as error:
            self._fails(str(error))

    def end(self, segments: Sequence[Segment]) -> Energy:
        modelled = self._substitute.end(segments)
        try:
            energy = self._meter.end(segments)
        except MeterUnreadable as error:
            self._fails(str(error))
            return modelled
        self._works = True
        return energy

    def _fails(self, why: str) -> None:
        if self._works:
            self._works = False
            self._failed(why)
