"""The plan of a measurement, in virtual time: planted seconds and slowdowns are found, within the given time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from paceline.core.batching.segment import SeqId
from paceline.engine.fake import fake_model
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.engine_loop.executor import StepLimits
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.profiling import EngineLanes, Load, Measurement, Operation, engine_operations, host_operations
from paceline.runtime.units import UnitRegistry
from paceline.workflow.activity import Slowdown

pytestmark = pytest.mark.anyio

TRUE = Slowdown((5.0, 20.0, 60.0), (1.0, 1.5, 3.0))
GB_S = 2.0  # of every launch


@dataclass
class World:
    """A machine whose launches take what is planted. stalls: launches (counted from 1) during which it is suspended."""

    now: float = 0.0
    used: float = 0.0  # GB/s, of loads
    launches: int = 0
    stalls: frozenset[int] = frozenset()
    begun: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def operation(self, name: str, kind: str, fixed: float, each: float, shapes: tuple[int, ...]) -> Operation:
        async def launch(items: int) -> float:
            self.launches += 1
            noise = 1.0 + 0.04 * ((self.launches * 7) % 5 - 2) / 2
            seconds = (fixed + each * items) * TRUE.at(GB_S + self.used) * noise
            seconds += 3600.0 if self.launches in self.stalls else 0.0
            self.now += seconds
            return seconds

        return Operation((f"agent/{name}", f"chat/{name}"), kind, shapes, launch)

    def demand(self, operation: str, kind: str, shape: int) -> float:  # noqa: ARG002
        fixed, each = (0.02, 0.001) if operation.endswith("prefill") else (0.0, 0.03)
        return GB_S * 1e9 * (fixed + each * shape)

    def operations(self) -> list[Operation]:
        return [
            self.operation("prefill", "engine", 0.02, 0.001, (32, 128)),
            self.operation("decode", "cpu", 0.0, 0.03, (1, 4)),
        ]


@dataclass
class Planted:
    world: World
    bandwidth: float

    @property
    def name(self) -> str:
        return f"{self.bandwidth:g} GB/s"

    async def begin(self) -> None:
        self.world.used += self.bandwidth
        self.world.begun.append(self.name)

    async def end(self) -> None:
        self.world.used -= self.bandwidth


def loads(world: World) -> list[Load]:
    return [Planted(world, gb_s) for gb_s in (10.0, 25.0, 50.0)]


@pytest.mark.parametrize("stalls", [frozenset(), frozenset({150, 300})], ids=["steady", "suspended"])
async def test_planted_seconds_and_slowdowns_are_found_under_every_name(stalls: frozenset[int]) -> None:
    world = World(stalls=stalls)
    measurement = Measurement(world.operations(), world.demand, 7300.0 if stalls else 100.0, world.clock)
    profiles = await measurement.run(loads(world))
    assert measurement.notes == []
    assert dict(profiles.items()).keys() == {
        (f"{model}/{phase}", kind)
        for model in ("agent", "chat")
        for phase, kind in (("prefill", "engine"), ("decode", "cpu"))
    }
    prefill, decode = profiles.get("chat/prefill", "engine"), profiles.get("agent/decode", "cpu")
    assert prefill is not None and decode is not None
    assert [prefill.seconds(32), prefill.seconds(128)] == pytest.approx([0.052, 0.148], rel=0.03)
    assert [decode.seconds(1), decode.seconds(4)] == pytest.approx([0.03, 0.12], rel=0.03)
    assert decode.bandwidth(4) == pytest.approx(GB_S, rel=0.05)
    for used in (2.0, 12.0, 27.0, 52.0):
        assert prefill.slowdown.at(used) == pytest.approx(TRUE.at(used), rel=0.08)


async def test_a_measurement_ends_in_time_and_says_what_it_left_out() -> None:
    world = World()
    told: list[float] = []
    slow = world.operation("slow", "engine", 0.0, 1.0, (1, 2, 64))
    measurement = Measurement(
        [slow, world.operations()[1]], world.demand, 30.0, world.clock, lambda _, share: told.append(share)
    )
    profiles = await measurement.run(loads(world))
    assert world.now <= 30.0 + 2 * 4.2, "one pair of launches may go beyond it"
    assert told == sorted(told) and told[-1] == 1.0
    assert any("slow of 64 and more takes too long" in note for note in measurement.notes)
    assert any("no time for chat/slow beside" in note for note in measurement.notes)
    found = profiles.get("chat/slow", "engine")
    assert found is not None and found.shapes == (1, 2)
    quick = profiles.get("chat/decode", "cpu")
    assert quick is not None and quick.slowdown.at(52.0) > 2.0, "a slow operation takes no time from quick ones"


async def test_the_load_ends_where_a_launch_fails() -> None:
    world = World()

    async def fail(items: int) -> float:
        if world.used:
            raise RuntimeError("no launch")
        world.now += 0.01
        return 0.01 * items

    measurement = Measurement([Operation(("a/b",), "cpu", (1,), fail)], world.demand, 9.0, world.clock)
    with pytest.raises(RuntimeError, match="no launch"):
        await measurement.run(loads(world))
    assert world.used == 0.0 and world.begun == ["10 GB/s"]


async def test_launches_run_on_the_units_of_a_node_and_leave_nothing_behind(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = fake_model(3, 0.3, capacity_rows=None)
    worker = EngineWorker(model.engine, StepLimits())
    registry = UnitRegistry("device")
    ticks = iter(range(1_000_000))
    await worker.start()
    lanes = EngineLanes(worker, lambda: float(next(ticks)), model.engine.info.max_positions)
    with DocumentStore.open(tmp_path, HashEmbedder(), side="device") as store:
        without = host_operations(registry, store, None, lanes.clock)
        store.add_text("rooms.md", "The broom is in the hall.", zone="device")
        operations = [*engine_operations(lanes, registry), *host_operations(registry, store, None, lanes.clock)]
        assert [each.names[-1] for each in without] == ["embed/encode"]
        assert [each.names[-1] for each in operations] == ["chat/prefill", "chat/decode", "embed/encode", "host/search"]
        for operation in operations:
            for shape in operation.shapes:
                assert await operation.launch(shape) == 1.0, "the clock is read at the beginning and at the end"
    lanes.close()
    await worker.stop()
    registry.close()
    assert all(model.engine.length(SeqId(seq)) == 0 for seq in range(30))
