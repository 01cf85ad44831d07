"""Simulated conditions for the tests of strategies: delays, losses, speeds, and what changes while an answer runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from lab.simulation import Network, SimulatedRequest, Simulation
from paceline.engine.base import Engine
from paceline.strategies.base import SIDES
from tests.strategies.cases import engines

SHORT = 10  # tokens of an answer in which every step is disturbed once
IN_ORDER = Network((0.03, 0.05))
REORDERING = Network((0.03, 0.05), reorders=True)


@dataclass(frozen=True, slots=True)
class Conditions:
    network: Network
    forward: Mapping[str, float]
    search: Mapping[str, float]

    def world(self, request: SimulatedRequest, seed: int, by: Mapping[str, Engine] | None = None) -> Simulation:
        return Simulation(
            request, by or engines(), seed=seed, network=self.network, forward=self.forward, search=self.search
        )


def harsh(seed: int, *, reorders: bool = False) -> Conditions:
    """Delays up to a second, slow engines, slow retrieval, another mixture for every seed.

    reorders: messages overtake each other, and are lost and duplicated.
    """
    chance = random.Random(f"harsh {seed}")
    slowest = chance.choice((0.0, 0.02, 0.3, 1.0))
    delay = slowest * chance.random(), slowest
    loss, duplicate = chance.choice((0.0, 0.1, 0.3)), chance.choice((0.0, 0.4))
    network = Network(delay, reorders=True, loss=loss, duplicate=duplicate) if reorders else Network(delay)
    forward = {"cloud": chance.choice((0.001, 0.02, 0.2)), "device": chance.choice((0.001, 0.06, 0.2))}
    return Conditions(network, forward, {side: chance.choice((0.0, 0.1, 2.0)) for side in SIDES})


def changing_speeds(world: Simulation) -> None:
    """Every now and then each side computes as fast as the other did."""
    if world.events % 40 == 0:
        cloud, device = world.hosts["cloud"], world.hosts["device"]
        cloud.forward, device.forward = device.forward, cloud.forward


class Flapping:
    """Cuts and mends the link at random."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"flap {seed}")

    def __call__(self, world: Simulation) -> None:
        if self._chance.random() < 0.02:
            world.cut()
        elif self._chance.random() < 0.05:
            world.mend()
