"""Energy of answers of two linked nodes: reported in every strategy, budgets kept or refused, and a debt that stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.core.energy import PowerMeter, WorkloadMeter
from paceline.core.offloading import ModelShape, Unit
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine, fake_model
from paceline.errors import PacelineError, RequestError
from paceline.runtime.energy import SideEnergy
from paceline.runtime.node import Node
from paceline.runtime.resources import Company, Computing, NodeParts
from paceline.strategies.base import SIDES
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Options
from paceline.wire.verify_messages import VerifyOptions
from tests.requests import a_request, changed
from tests.runtime.test_node import Bench, bench_of, collect, open_gate, side_by_side

pytestmark = pytest.mark.anyio

REQUEST = a_request(
    messages=({"role": "user", "content": "Where is the key?"},),
    sampling=SamplingParams(temperature=1.0, seed=5),
    max_tokens=16,
    strategy="draft_verify",
)
SHAPE = ModelShape(layers=2, hidden=64, inner=256)


def modelled(budget: tuple[float, Unit] | None = None, state_dir: Path | None = None) -> SideEnergy:
    """Joules by operations: no clock, so every run has the same."""
    meter = WorkloadMeter("workload", SHAPE, flops_per_s=1e6, watts=12.0)
    return SideEnergy(meter, send_w=0.2, budget=budget, state_dir=state_dir)


@asynccontextmanager
async def linked(device: SideEnergy | None = None, cloud: SideEnergy | None = None) -> AsyncIterator[Bench]:
    company, energies = Company(asks=open_gate()), {"cloud": cloud, "device": device}
    models = {side: fake_model(seed, 0.3) for seed, side in enumerate(SIDES, 1)}
    parts = {
        side: NodeParts(computing=Computing(energy=energies[side] or SideEnergy()), company=company) for side in SIDES
    }
    async with side_by_side(bench := bench_of(models, parts=parts)):
        yield bench


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
async def test_every_strategy_reports_the_joules_of_the_side_that_faces_the_client(strategy: str) -> None:
    async with linked(modelled(), modelled()) as bench:
        for node in (bench.device, bench.cloud):
            _, done = await collect(await node.prepare(changed(REQUEST, strategy=strategy)))
            assert done.strategy == strategy and list(done.energy) == [node.side]
            use = done.energy[node.side]
            assert use.meter == "workload" and (use.computed.source, use.sent.source) == ("modelled", "modelled")
            tokens, prompt = done.completion_tokens, done.prompt_tokens
            least = SHAPE.flops(prompt - done.stats["cached_tokens"], 0) * 12.0 / 1e6  # type: ignore[arg-type]
            assert use.computed.joules >= least > 0.0 and tokens > 0


async def test_answers_that_share_batches_have_shares_and_a_meter_by_seconds_is_measured() -> None:
    seconds = 0.0

    def clock() -> float:
        nonlocal seconds
        seconds += 1.0
        return seconds

    energy = SideEnergy(PowerMeter("battery", lambda: 2.0, clock, measured=True))
    node = Node(
        "device", LoadedModel(FakeEngine(seed=1), ByteTokenizer()), None, NodeParts(computing=Computing(energy=energy))
    )
    async with node:
        asked = [changed(REQUEST, strategy="autoregressive", sampling=SamplingParams(seed=seed)) for seed in range(4)]
        done = [await each for each in [asyncio.ensure_future(collect(await node.prepare(one))) for one in asked]]
        steps = node.load().steps
    uses = [result.energy["device"] for _, result in done]
    assert all(use.computed.measured and use.computed.joules > 0.0 for use in uses)
    assert sum(use.joules for use in uses) <= 2.0 * 2 * steps, "no joule is counted twice"


async def test_without_a_meter_nothing_is_reported_and_no_budget_is_kept() -> None:
    async with linked() as bench:
        _, done = await collect(await bench.device.prepare(REQUEST))
        assert done.energy == {}
        with pytest.raises(RequestError, match="neither measures nor models") as refused:
            await bench.device.prepare(changed(REQUEST, options={"joules_per_token": 0.1}))
        assert refused.value.param == "paceline.energy"
        _, done = await collect(await bench.cloud.prepare(changed(REQUEST, options={"joules_per_token": 0.1})))
        assert done.degraded == "device_refused" and "energy.meter is off" in done.strategy_reason


async def test_a_budget_is_refused_where_another_strategy_writes() -> None:
    async with linked(modelled()) as bench:
        for strategy, options in (("lookup_tree", {"joules_per_token": 0.1}), ("aggregate", {"joules_per_step": 0.0})):
            with pytest.raises(RequestError, match="kept by the strategy 'draft_verify' alone") as refused:
                await bench.device.prepare(changed(REQUEST, strategy=strategy, options=options))
            assert (refused.value.param, refused.value.code) == ("paceline.energy", "energy_budget_not_kept")


async def test_a_budget_in_another_unit_than_the_devices_own_is_refused_at_the_device() -> None:
    async with linked(modelled((1.2, "step"))) as bench:
        with pytest.raises(RequestError, match="name joules_per_step"):
            await bench.device.prepare(changed(REQUEST, options={"joules_per_token": 0.1}))
        await collect(await bench.device.prepare(changed(REQUEST, options={"joules_per_step": 0.1})))


async def test_the_debt_of_a_device_grows_over_requests_of_both_sides_and_is_there_after_a_restart(
    tmp_path: Path,
) -> None:
    """The text never depends on it."""
    debts, texts = [0.0], []
    for _ in range(2):
        energy = modelled((0.0, "token"), tmp_path)
        assert energy.debt.joules == debts[-1]
        async with linked(energy) as bench:
            for node in (bench.device, bench.cloud):
                text, done = await collect(await node.prepare(REQUEST))
                texts.append(text)
                assert done.strategy == "draft_verify"
        debts.append(energy.debt.joules)  # with what was still drafted when the last answer ended
    assert debts[0] < debts[1] <= debts[2] and len(set(texts)) == 1


# ---- what a device has spent beyond its budget: kept over restarts, shared by requests, forgotten where it is damaged
METER = PowerMeter("power", lambda: 12.0, lambda: 0.0, measured=False)


def test_a_debt_outlives_the_program(tmp_path: Path) -> None:
    energy = SideEnergy(METER, budget=(1.2, "step"), state_dir=tmp_path)
    queue = energy.queue(VerifyOptions())
    assert queue is not None and queue.weight is None, "by what a draft costs"
    queue.add(5.0)
    energy.save()
    energy.save()
    again = SideEnergy(METER, budget=(1.2, "step"), state_dir=tmp_path).queue(VerifyOptions())
    assert again is not None and again.backlog == pytest.approx(3.8)
    assert (tmp_path / "energy.json").stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "energy.json"], "nothing half-written is left"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"format": 2, "spent_beyond_budget_j": 1}',
        b'{"format": 1, "spent_beyond_budget_j": -1}',
        b'{"format": 1, "spent_beyond_budget_j": NaN}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_a_sentence_and_no_debt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    file = tmp_path / "energy.json"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        kept = SideEnergy(state_dir=tmp_path)
    assert kept.debt.joules == 0.0 and "is damaged" in caplog.text
    kept.debt.joules = 2.0
    kept.save()
    assert SideEnergy(state_dir=tmp_path).debt.joules == 2.0


def test_a_folder_that_takes_nothing_costs_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    kept = SideEnergy(state_dir=tmp_path / "state" / "device")
    kept.debt.joules = 1.0
    with caplog.at_level(logging.WARNING):
        kept.save()
    assert "cannot be kept" in caplog.text


def test_requests_share_one_debt_and_the_stricter_budget_holds() -> None:
    energy = SideEnergy(METER, budget=(0.5, "token"))
    own, stricter, looser, other_unit = (
        energy.queue(VerifyOptions(joules_per_token=asked, joules_per_step=step))
        for asked, step in ((None, None), (0.1, None), (9.0, None), (None, 0.1))
    )
    assert own and stricter and looser and other_unit
    assert [each.budget for each in (own, stricter, looser, other_unit)] == [0.5, 0.1, 0.5, 0.5]
    stricter.add(3.0, tokens=10)
    assert own.backlog == looser.backlog == pytest.approx(2.0)
    asked = SideEnergy(METER).queue(VerifyOptions(joules_per_step=0.7))
    assert asked is not None and (asked.budget, asked.per) == (0.7, "step")


def test_without_a_budget_there_is_no_queue_and_without_a_meter_none_is_kept() -> None:
    assert SideEnergy(METER).queue(VerifyOptions()) is None
    assert SideEnergy(METER).queue(Options()) is None
    with pytest.raises(PacelineError, match="neither measures nor models"):
        SideEnergy().queue(VerifyOptions(joules_per_token=1.0))
