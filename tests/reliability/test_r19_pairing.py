"""R19: guessed, repeated and raced enrolment codes, a device that is revoked, and clocks that are wrong. Restarts:
tests/e2e/test_identity.py; renewal and another server's key: tests/server."""

from __future__ import annotations

import asyncio
import base64
import math
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from device_agent.cloud import exchange
from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link.transport import TransportClosed
from paceline.wire.close_codes import CloseCode
from paceline.wire.identity import ALPHABET, BY_DEVICE, GROUP_LETTERS, GROUPS, code_secrets, request_bytes
from paceline.wire.messages import VERSION
from server.devices import MAX_TRIES
from tests.reliability.conftest import Figure, Size
from tests.reliability.raw_link import RawLink, device_link, enrolled
from tests.reliability.real_server import WAIT, RealServer, hurried, real_server
from tests.server.test_programs import STARTER

pytestmark = pytest.mark.anyio


HOUR_S = 3600.0
# The server with a clock on the wall that is wrong by as many seconds as the file `clock` says, from then on.
WRONG_CLOCK = f"""
import time
from pathlib import Path

right, wrong_by = time.time, Path("clock")
time.time = lambda: right() + (float(wrong_by.read_text()) if wrong_by.exists() else 0.0)
{STARTER}
"""


def guess(rng: random.Random, code_id: str = "") -> dict[str, Any]:
    """A request that enrols a key of the guesser's own, with a proof of a code that it does not have."""
    key = PrivateKey(rng.randbytes(32))
    letters = code_id or "".join(rng.choice(ALPHABET) for _ in range(GROUP_LETTERS))
    nonce = rng.randbytes(32)
    by_key = key.sign(request_bytes(BY_DEVICE, letters, key.public_key, nonce))
    made = {"key": key.public_key, "nonce": nonce, "code_signature": rng.randbytes(64), "key_signature": by_key}
    fields = {name: base64.b64encode(value).decode() for name, value in made.items()}
    return {"version": VERSION, "code_id": letters, **fields}


async def test_guesses_hit_no_code_and_void_one(
    hall: RealServer, size: Size, rng: random.Random, figure: Figure
) -> None:
    registry, hits, tries = hall.registry(), 0, size(100, 10_000)
    for number in range(8):
        registry.add(f"guessed-{number}")
    async with httpx.AsyncClient(base_url=hall.url, timeout=WAIT, trust_env=False) as http:

        async def answered(body: dict[str, Any]) -> int:
            while (status := (await http.post("/v1/devices/enrol", json=body)).status_code) == 429:
                await asyncio.sleep(0.01)  # an address has few places for those who guess
            return status

        for _ in range(0, tries, 4):
            statuses = await asyncio.gather(*(answered(guess(rng)) for _ in range(4)))
            hits += statuses.count(200)
            assert not [status for status in statuses if status >= 500]
        code = registry.add("tried")
        code_id = code_secrets(code).id
        for _ in range(MAX_TRIES):
            assert 400 <= await answered(guess(rng, code_id)) < 500
        with pytest.raises(ConfigError):
            await exchange(hall.url, code)
    assert hits == 0
    hall.check()
    secret = GROUP_LETTERS * (GROUPS - 1)
    figure("bits of a code that must be guessed", secret * math.log2(len(ALPHABET)), at_least=40, unit="bits")
    figure("guesses", tries)
    figure("hits", hits, at_most=0)


async def test_of_devices_that_race_for_a_code_one_wins(hall: RealServer, size: Size) -> None:
    for number in range(size(3, 100)):
        code = hall.registry().add(f"raced-{number}")
        ends = await asyncio.gather(*(exchange(hall.url, code) for _ in range(2)), return_exceptions=True)
        won = [end for end in ends if not isinstance(end, BaseException)]
        assert len(won) == 1 and all(isinstance(end, ConfigError | LinkClosed) for end in ends if end not in won)
        with pytest.raises(ConfigError):
            await exchange(hall.url, code)
        await (await device_link(hall.url, won[0])).close()


async def test_a_revoked_device_is_cut_and_refused(hall: RealServer, figure: Figure) -> None:
    credential = await enrolled(hall.url, hall.directory / "state", "revoked")
    link = await device_link(hall.url, credential)
    running = asyncio.create_task(link.run())
    began = time.monotonic()
    assert hall.registry().revoke("revoked")
    async with asyncio.timeout(WAIT):
        await running
    figure("revoked: link closed after", time.monotonic() - began, at_most=5, unit="s")
    assert link.close_code == 4104
    with pytest.raises(LinkClosed):
        await device_link(hall.url, credential)
    hall.check()


async def test_a_clock_that_jumps_cuts_no_link_and_only_lets_codes_and_absences_expire(tmp_path: Path) -> None:
    with real_server(tmp_path, *hurried(tmp_path), program=WRONG_CLOCK) as server:

        def jump(seconds: float) -> None:
            (tmp_path / "next").write_text(str(seconds))
            (tmp_path / "next").rename(tmp_path / "clock")

        linked, other = [await enrolled(server.url, tmp_path / "state", name) for name in ("phone", "laptop")]
        link = await device_link(server.url, linked)
        running = asyncio.create_task(link.run())
        code = server.registry().add("later")
        for offset in (HOUR_S, -HOUR_S, 0.0):
            jump(offset)
            await _answers(link)
            await asyncio.to_thread(server.check)
            await (await device_link(server.url, other)).close()
            if offset > 0:
                with pytest.raises(ConfigError):  # it is valid for ten minutes
                    await exchange(server.url, code)
        await exchange(server.url, code)
        jump(60 * 24 * HOUR_S)
        with pytest.raises(TransportClosed) as refused:
            await device_link(server.url, other)
        assert refused.value.code == CloseCode.AWAY_TOO_LONG
        jump(0.0)
        await (await device_link(server.url, other)).close()
        link.abort()
        await running
        server.check()


async def _answers(link: RawLink) -> None:
    """The server takes what is sent on the link, and has not closed it."""
    await link.settled()
    assert not link.closed.is_set(), link.close_code
