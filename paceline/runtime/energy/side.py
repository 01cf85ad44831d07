"""Energy of one side of the program: its meter, its radio's power, its budget, and the debt to that budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.energy import StepMeter
from paceline.core.offloading import EnergyDebt, EnergyQueue, Unit
from paceline.errors import PacelineError
from paceline.runtime.energy.debt_file import DebtFile
from paceline.wire.options import Options


@dataclass(slots=True)
class SideEnergy:
    """By default of a side that knows nothing of its energy."""

    meter: StepMeter | None = None
    send_w: float = 0.0  # while sending
    budget: tuple[float, Unit] | None = None  # the owner's, of drafting; None: none
    kept: DebtFile | None = None  # None: the debt ends with the program
    debt: EnergyDebt = field(init=False)

    def __post_init__(self) -> None:
        self.debt = EnergyDebt() if self.kept is None else self.kept.debt

    def queue(self, options: Options) -> EnergyQueue | None:
        """The device's one debt under the budget of an answer: the request's or the owner's, the stricter of both. Of
        budgets in different units the owner's holds. None: no budget.

        Raises PacelineError for a request's budget where nothing is known of this side's energy.
        """
        asked = options.energy_budget
        own = None if self.budget is None else self._queue(*self.budget)
        if asked is None:
            return own
        if self.meter is None:
            raise PacelineError("it neither measures nor models its energy (energy_meter is off)")
        joules, per = asked
        if own is None:
            return self._queue(joules, per)
        return own.limited(joules, per)

    def _queue(self, joules: float, per: Unit) -> EnergyQueue:
        return EnergyQueue(joules, per=per, weight=None, debt=self.debt)

    def save(self) -> None:
        """Keep the debt for the next start. Writes the disk."""
        if self.kept is not None:
            self.kept.save()
