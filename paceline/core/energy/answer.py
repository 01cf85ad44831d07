"""The account of one answer at one side: its shares of forwards, and what its messages took to send."""

from __future__ import annotations

from paceline.core.energy.values import NOT_KNOWN, Energy, EnergyUse, Spent


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
