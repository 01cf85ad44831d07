"""R33: many sessions of every manner on a real pair: memory, descriptors and threads do not grow, none is stuck.

Short: a few hundred sessions; nightly: an hour. Growth of memory is the slope of a straight line through samples after
a warm-up; in the short form it is mostly noise, and judged at night alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from lab.baselines.dragon import shaped
from paceline.core.side import SIDES
from tests.e2e.pair import QUESTION, Pair
from tests.reliability.conftest import Figure, Size
from tests.reliability.honest import STRICT, client_of

pytestmark = pytest.mark.anyio

AT_ONCE = 4
MIB = 2**20
WAYS = (
    {"strategy": "autoregressive"},
    {"strategy": "lookup_tree"},
    {"strategy": "aggregate", "debug": {"aggregator": "mixture"}},
    {"strategy": "aggregate", "debug": {"aggregator": "coin"}},
    {"strategy": "aggregate", **shaped("sequence")},
)


class Soak:
    def __init__(self, pair: Pair, rng: random.Random) -> None:
        self._pair = pair
        self._rng = rng
        self._processes = {"cloud": pair.started.cloud.process.pid, "device": pair.started.device.process.pid}
        self.outcomes: Counter[str] = Counter()

    async def sessions(self, count: int) -> None:
        """So many more, a few at once."""
        left = iter(range(count))

        async def work() -> None:
            for _ in left:
                await self._session(self._rng.choice(SIDES))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())

    async def _session(self, side: str) -> None:
        rng = self._rng
        number = rng.randrange(10**6)
        asked = {"model": "fake", "messages": [{"role": "user", "content": f"{QUESTION} {number}"}], "seed": number}
        asked |= {"max_tokens": 24, "temperature": rng.choice((0.0, 1.0)), "paceline": rng.choice(WAYS)}
        kind = rng.choice(("whole", "stream", "left", "schema", "background", "refused"))
        async with client_of(self._pair.url("cloud" if side == "cloud" else "device")) as http:
            match kind:
                case "whole":
                    await self._ended(http.post("/v1/chat/completions", json=asked))
                case "schema":
                    await self._ended(http.post("/v1/chat/completions", json=asked | {"response_format": STRICT}))
                case "refused":
                    answer = await http.post("/v1/chat/completions", json=asked | {"temperature": 900})
                    assert answer.status_code == 400
                case "background":
                    body = {"model": "fake", "input": QUESTION, "max_output_tokens": 24, "background": True}
                    made = (await self._ended(http.post("/v1/responses", json=body)))["id"]
                    while (await self._ended(http.get(f"/v1/responses/{made}")))["status"] in ("queued", "in_progress"):
                        pass  # each look is a request
                    await self._ended(http.delete(f"/v1/responses/{made}"))
                case _:
                    async with http.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as answer:
                        assert answer.status_code == 200, await answer.aread()
                        lines = [line async for line in _until(answer, 3 if kind == "left" else None) if line]
                        assert kind == "left" or lines[-1] == "data: [DONE]"
        self.outcomes[kind] += 1

    async def _ended(self, request: object) -> dict[str, object]:
        answer = await request  # type: ignore[misc]
        assert answer.status_code == 200, answer.text
        return dict(json.loads(answer.text))

    async def idle(self) -> dict[str, dict[str, float]]:
        """Wait until no answer is under way on either side; what their metrics say then."""
        said: dict[str, dict[str, float]] = {}
        for side in SIDES:
            async with asyncio.timeout(60), client_of(self._pair.url(side)) as http:
                while True:
                    page = (await http.get("/metrics")).text
                    said[side] = {key: float(value) for key, value in re.findall(r"^(\w+) ([\d.e+]+)$", page, re.M)}
                    if said[side]["paceline_answers"] == 0:
                        break
        return said

    def sample(self) -> dict[str, tuple[int, int, int]]:
        """Bytes, descriptors and threads of each program."""
        found = {}
        for side, pid in self._processes.items():
            process = psutil.Process(pid)
            found[side] = process.memory_info().rss, process.num_fds(), process.num_threads()
        return found


async def _until(answer: httpx.Response, lines: int | None) -> AsyncIterator[str]:
    """Lines of a stream, whose client leaves after so many."""
    async for line in answer.aiter_lines():
        yield line
        if lines is not None and (lines := lines - 1) == 0:
            return


async def test_a_pair_that_has_served_many_sessions_is_as_it_was(
    pair: Pair, rng: random.Random, size: Size, figure: Figure
) -> None:
    soak = Soak(pair, rng)
    nightly_s, per_sample, enough = size(0, 3600), size(12, 200), size(3, 12)
    await soak.sessions(size(12, 1000))  # caches and pools are filled
    before = await soak.idle()
    begun = time.monotonic()
    at: list[float] = []
    samples = []
    while len(samples) < enough or time.monotonic() - begun < nightly_s:
        await soak.sessions(per_sample)
        await soak.idle()
        at.append(time.monotonic() - begun)
        samples.append(soak.sample())
    after = await soak.idle()
    done = sum(soak.outcomes.values())
    assert len(soak.outcomes) == 6, soak.outcomes
    pair.children.check()
    for side in SIDES:
        log = (Path(pair.children.directory) / f"{side}.log").read_text("utf-8", "replace")
        assert "Traceback" not in log, log[log.index("Traceback") - 300 :][:3000]
        memory = np.array([sample[side][0] for sample in samples]) / MIB
        slope = float(np.polyfit(np.array(at) / 3600, memory, 1)[0])
        per_session = float(np.polyfit(np.arange(1, len(memory) + 1) * per_sample, memory, 1)[0])
        figure(f"growth of the {side}'s memory", slope, at_most=1.0 if nightly_s else None, unit="MiB/h")
        figure(f"growth of the {side}'s memory", per_session * 1000, unit="MiB per 1,000 sessions")
        files = [sample[side][1] for sample in samples]
        threads = [sample[side][2] for sample in samples]
        # Idle connections of pools come and go; a leak is one for each of hundreds of sessions.
        assert max(files) - min(files) < per_sample, files
        assert max(threads) - min(threads) < per_sample, threads
        figure(f"descriptors of the {side}: last less first", files[-1] - files[0], at_most=4)
        figure(f"threads of the {side}: last less first", threads[-1] - threads[0], at_most=4)
        assert after[side]["paceline_answers"] == 0
        if "paceline_kv_free_rows" in before[side]:
            assert after[side]["paceline_kv_free_rows"] == before[side]["paceline_kv_free_rows"], "rows are stuck"
    figure("sessions", done)
    figure("stuck sessions", 0, at_most=0)
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        for side in SIDES:
            assert (await http.get(f"{pair.url(side)}/readyz")).json()["linked"]
