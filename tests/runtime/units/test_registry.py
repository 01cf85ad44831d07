"""Declared units of a node: what they may run, on which cores, and what computes there."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from paceline.rag.compute_threads import ComputeThreads
from paceline.runtime.units.registry import HostUnit, UnitRegistry

pytestmark = pytest.mark.anyio
CORE = min(os.sched_getaffinity(0))


async def test_a_unit_does_what_it_is_for_on_its_cores_and_models_compute_there() -> None:
    hosts = (HostUnit("left", frozenset({CORE}), frozenset({"rerank"})), HostUnit("right", frozenset()))
    registry = UnitRegistry("device", lanes=2, hosts=hosts, engine="gpu")
    by_name = {unit.name: unit for unit in registry.units}
    assert by_name["left"].models == {"rerank"} and by_name["right"].models == {"rerank", "embed", "host"}
    assert {name for name in by_name if name.startswith("gpu")} == {"gpu 0", "gpu 1"}
    model = ComputeThreads(1, "model", 1)

    def look() -> tuple[set[int], str]:
        return model.run(lambda: (os.sched_getaffinity(0), threading.current_thread().name))

    cores, thread = await registry.run("left", look)
    assert cores == {CORE} and thread.startswith("unit left")
    assert (await registry.run("right", look))[1].startswith("unit right")
    assert (await asyncio.to_thread(look))[1].startswith("model")  # of the model, where the caller is no unit
    registry.close()


def test_what_no_unit_does_is_refused() -> None:
    with pytest.raises(ValueError, match="no unit does embed and search"):
        UnitRegistry("device", hosts=(HostUnit("left", does=frozenset({"rerank"})),))
