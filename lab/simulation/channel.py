"""A radio channel whose rate varies with time: Shannon's capacity under path loss and Rayleigh block fading.

GELATO section II-B and Table I; what the paper leaves open is frozen in the defaults of `RadioParameters`. Pure: the
same seed gives the same rates. Not modelled: interference, errors and retransmissions, other users of the band.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Protocol


class Channel(Protocol):
    """One direction of a link whose rate depends on the time."""

    def finish(self, start: float, num_bytes: float) -> float:
        """Time in s at which a message that begins to be sent at `start` has left."""


@dataclass(frozen=True, slots=True)
class RadioParameters:
    """What the mean rate of a radio channel depends on.

    Path loss is 128.1 + 37.6 log10(distance in km) dB (3GPP TR 36.814, urban macro cell).
    """

    bandwidth: float  # Hz
    transmit_w: float = 0.2  # 23 dBm (Table I)
    noise_dbm_hz: float = -174.0  # N0 (Table I)
    distance_km: float = 0.3

    def __post_init__(self) -> None:
        if min(self.bandwidth, self.transmit_w, self.distance_km) <= 0.0:
            raise ValueError(f"bandwidth, power and distance are above 0, not {self}")

    @property
    def mean_snr(self) -> float:
        """Signal over noise without fading."""
        loss_db = 128.1 + 37.6 * math.log10(self.distance_km)
        noise_w = math.pow(10.0, (self.noise_dbm_hz - 30.0) / 10.0) * self.bandwidth
        return self.transmit_w * math.pow(10.0, -loss_db / 10.0) / noise_w

    def rate(self, fading: float) -> float:
        """Bytes/s at a fading gain |g|², whose mean is 1 (r of GELATO, section II-B)."""
        return self.bandwidth * math.log2(1.0 + self.mean_snr * fading) / 8.0


@dataclass(slots=True)
class FadingChannel:
    """Rayleigh block fading: |g|² is Exp(1), drawn for each block of time and constant within it."""

    radio: RadioParameters
    block_s: float = 0.5  # s, coherence time; about a step of the paper, which draws one gain for each
    seed: int = 0
    _gains: list[float] = field(default_factory=list)

    def rate(self, time: float) -> float:
        """Bytes/s at a time from 0 on."""
        return self._rate(int(time / self.block_s))

    def finish(self, start: float, num_bytes: float) -> float:
        """A message takes the rate of each block that it is sent in."""
        block, time, left = int(start / self.block_s), start, num_bytes
        while True:
            rate, end = self._rate(block), (block + 1) * self.block_s
            if left <= rate * (end - time):
                return time + left / rate
            left -= rate * (end - time)
            block, time = block + 1, end

    def _rate(self, block: int) -> float:
        while len(self._gains) <= block:  # one generator a block, so that the order of questions changes nothing
            self._gains.append(Random(f"{self.seed}/{len(self._gains)}").expovariate(1.0))
        return self.radio.rate(self._gains[block])
