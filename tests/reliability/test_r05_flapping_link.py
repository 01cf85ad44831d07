"""R5: a link that is cut again and again in one answer; a storm of devices that return to a restarted server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from device_agent.cloud import Cloud, Credentials
from lab.baselines.dragon import shaped
from paceline.commands.demo import Children, configured
from paceline.engine.fake import fake_model
from paceline.runtime.link.connection import Link
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Introduction
from tests.e2e.pair import DEVICE, QUESTION, running_pair, started
from tests.postgres import registry_of
from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import quantile
from tests.reliability.streams import WAIT_S, Stream

PACE = "forward=10ms"


def test_an_answer_that_pauses_at_each_cut_is_the_undisturbed_one(
    tmp_path: Path, size: Size, rng: random.Random, figure: Figure
) -> None:
    """Two questions are all that the device answers: joining one again costs none."""
    cuts, tokens = size(5, 100), size(100, 512)
    asks = ("--cloud-asks-per-minute", "2", "--cloud-asks-per-hour", "2")
    pace = configured(tmp_path, f"tuning.emulate = {PACE!r}")
    with running_pair(tmp_path, stoppable=True, cloud_flags=pace, agent_flags=(*pace, *asks)) as pair:
        assert pair.turnstile is not None

        def ask() -> Stream:
            body = {
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": tokens,
                "temperature": 1.0,
                "seed": 5,
                "logit_bias": {"256": -100},
                "paceline": {
                    "device": DEVICE,
                    "strategy": "aggregate",
                    "report": True,
                    **shaped("none"),
                    "on_device_loss": "pause",
                },
            }
            return Stream(pair.url("cloud"), body)

        joint = ask().join()
        assert joint.whole and joint.tokens == tokens, joint.error
        answer = ask()
        places = sorted(rng.sample(range(1, max(cuts + 1, int(0.9 * len(joint.pieces)))), cuts))
        for place in places:
            answer.wait_for(place)
            pair.turnstile.cut()
        answer.join()
    assert answer.whole, answer.error
    assert answer.text == joint.text and answer.tokens == tokens
    figure("cuts during the answer", cuts)
    figure("longest gap", answer.gap_after(answer.began), unit="s")


@pytest.mark.anyio
async def test_a_storm_of_devices_returns_to_a_restarted_server(tmp_path: Path, size: Size, figure: Figure) -> None:
    """Each has its own key and its own link; clients meanwhile get answers, and no 5xx once the server is there."""
    count = size(8, 500)
    model = fake_model()
    info = model.engine.info
    known = Introduction(model.tokenizer.fingerprint, info.fingerprint, "fake", list(STRATEGIES), 1, asked_by=None)
    up: asyncio.Queue[float] = asyncio.Queue()

    def linked(_: Link) -> None:
        up.put_nowait(time.monotonic())

    def device(number: int, code: str) -> Cloud:
        kept = Credentials(tmp_path / f"device{number}")
        return Cloud([url], kept, code=code, name=f"device{number}", introduce=lambda: known, up=linked)

    with Children(tmp_path) as children:
        child = started(children, "cloud", "serve")
        url, port = child.url, int(child.url.rsplit(":", 1)[1])
        registry = registry_of(tmp_path / "cloud")
        devices = [device(number, registry.add(f"device{number}")) for number in range(count)]
        for each in devices:
            assert await each.enrol()
        async with asyncio.TaskGroup() as tasks:
            linking = [tasks.create_task(each.keep_linked()) for each in devices]
            try:
                async with asyncio.timeout(WAIT_S):
                    for _ in range(count):
                        await up.get()
                os.kill(child.process.pid, signal.SIGKILL)
                child.process.wait()
                children.members.remove(child)
                await asyncio.to_thread(started, children, "cloud", "serve", port=port)
                began = time.monotonic()
                asking = tasks.create_task(_ask_until(url, lambda: up.qsize() >= count))
                async with asyncio.timeout(2 * WAIT_S):
                    statuses = await asking
                waits = [max(0.0, up.get_nowait() - began) for _ in range(count)]
            finally:
                for task in linking:
                    task.cancel()
    assert {*statuses} == {200}
    figure(f"{count} devices return: 95 % linked after", quantile(waits, 0.95), at_most=30.0, unit="s")
    figure("answers meanwhile without a fault", len(statuses), at_least=1)


async def _ask_until(url: str, done: Callable[[], bool]) -> list[int]:
    """Statuses of answers asked for one after the other."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    statuses: list[int] = []
    async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http:
        while not (statuses and done()):
            statuses.append((await http.post(f"{url}/v1/chat/completions", json=body)).status_code)
    return statuses
