"""Values of energy: joules with where they come from, what a machine is told, and what an answer has used."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

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
