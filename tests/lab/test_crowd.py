"""Many devices in virtual time find another server when theirs is lost."""

from __future__ import annotations

import pytest

from lab.crowd import DELAY_S, World
from paceline.runtime.link.connection import SPREAD_S
from paceline.wire.link import HEARTBEAT_S, MAX_MISSED


@pytest.mark.parametrize("hangs", [False, True])
def test_devices_of_a_lost_server_are_elsewhere_as_soon_as_their_links_say(hangs: bool) -> None:
    devices = 200
    world = World(devices, 3)
    world.run(lambda: world.linked == devices, 10.0)
    assert world.linked == devices and not world.events["lost"]
    world.run(lambda: False, 4.0 * HEARTBEAT_S)
    assert world.linked == devices and not world.events["lost"], "at rest every heartbeat is answered"
    began, lost = world.now, len(world.cores[0].links)
    world.lose(world.cores[0], hangs=hangs)
    world.run(lambda: world.linked == devices and world.events["lost"] == lost, 30.0)
    noticed = (MAX_MISSED + 1) * HEARTBEAT_S if hangs else 0.0
    assert world.linked == devices and lost == world.events["lost"] > 20
    assert world.now - began <= noticed + SPREAD_S + 20.0 * DELAY_S
    assert not any(end.core is world.cores[0] for core in world.cores[1:] for end in core.links)
