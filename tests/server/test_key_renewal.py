"""Renewal of devices' keys over real links: at half of their life, with copies, crashes and refusals."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from device_agent.cloud import CloudKeys, Credentials, http_url
from paceline.errors import ConfigError
from paceline.runtime.identity import PrivateKey
from paceline.wire.close_codes import CloseCode
from server import devices, links
from tests.clocks import read_from
from tests.server.test_devices import Clock, claim
from tests.server.test_links import Site, logged, site

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("cheap_codes")]


async def renewed(state: Path, here: Site, former: bytes) -> PrivateKey:
    """Wait until the device holds one key, and not the former one."""
    async with asyncio.timeout(60):
        while True:
            await here.live.check()
            await here.live.renew()
            found = Credentials(state).get(http_url(here.url))
            assert found is not None
            if len(found.keys) == 1 and found.keys[0].public_key != former:
                return found.keys[0]
            await asyncio.sleep(0.01)


def key_in(state: Path, here: Site) -> PrivateKey:
    found = Credentials(state).get(http_url(here.url))
    assert found is not None
    return found.keys[0]


async def test_a_key_is_renewed_at_half_of_its_life_over_the_open_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RENEW_S", 0.0)  # the device pauses after a renewal: it is asked until it replies
    clock, agent = Clock(), tmp_path / "agent"
    read_from(monkeypatch, clock, devices, links)
    async with site(tmp_path, credential_hours=24) as here:
        ours, theirs = await here.linked(agent, here.registry.add("phone"))
        first = key_in(agent, here)
        clock.now += 11 * 3600
        for _ in range(2):
            await here.live.check()
            await here.live.renew()
            assert not ours.renewal.awaited
        clock.now += 2 * 3600
        second = await renewed(agent, here, first.public_key)
        assert not ours.closed.is_set() and not theirs.closed.is_set()
        assert here.registry.recognise(claim("phone", second)) == second.public_key == ours.renewal.present
        assert here.registry.recognise(claim("phone", first)) is CloseCode.KEY_REPLACED
        clock.now += 13 * 3600
        third = await renewed(agent, here, second.public_key)
        assert here.registry.recognise(claim("phone", third)) == third.public_key
        await theirs.close()
        assert (await here.peers.links.get())[1] == "phone", "the agent links again with the key of the day"


async def test_a_copy_of_a_device_is_found_out_at_the_next_renewal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, agent = Clock(), tmp_path / "agent"
    read_from(monkeypatch, clock, devices, links)
    async with site(tmp_path) as here:
        await here.linked(agent, here.registry.add("phone"))
        shutil.copytree(agent, tmp_path / "copy")
        first = key_in(agent, here)
        clock.now += 13 * 3600
        await renewed(agent, here, first.public_key)
        copy = here.agent(tmp_path / "copy", None, lambda _: None)
        assert await copy.enrol()
        here.keep(copy)
        await logged(caplog, "another machine uses a copy of it")
        assert "paceline devices revoke phone" in caplog.text
        assert here.peers.links.empty()


async def test_a_device_that_sends_no_new_key_is_cut_when_its_own_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RENEW_S", 0.0)
    monkeypatch.setattr(CloudKeys, "make_key", no_key)
    clock = Clock()
    read_from(monkeypatch, clock, devices, links)
    async with site(tmp_path) as here:
        ours, theirs = await here.linked(tmp_path / "agent", here.registry.add("phone"))
        clock.now += 23 * 3600
        for _ in range(3):
            await here.live.check()
            await here.live.renew()
        assert not ours.closed.is_set(), "it still has an hour"
        clock.now += 2 * 3600
        await here.live.renew()
        await theirs.closed.wait()
        assert theirs.close_code == CloseCode.NOT_RENEWED
        assert (await here.peers.links.get())[1] == "phone", "it may link again, and is asked again"


async def no_key(_: CloudKeys) -> PrivateKey:
    raise ConfigError("the disk is full")


@pytest.mark.parametrize("kept", ["present", "new"])
async def test_an_agent_that_died_in_mid_renewal_is_let_in(tmp_path: Path, kept: str) -> None:
    agent = tmp_path / "agent"
    async with site(tmp_path) as here:
        _, theirs = await here.linked(agent, here.registry.add("phone"))
        here.kept.pop().cancel()
        await theirs.closed.wait()
        credentials, cloud = Credentials(agent), http_url(here.url)
        credential = credentials.get(cloud)
        assert credential is not None
        keys = CloudKeys(credentials, cloud, credential)
        new, present = await keys.make_key(), key_in(agent, here)
        assert (await keys.make_key()).seed == new.seed, "no third key"
        if kept == "new":
            assert here.registry.renew("phone", present.public_key, new.public_key)
        await here.linked(agent, None)
        held = credentials.get(cloud)
        async with asyncio.timeout(60):
            while held is None or len(held.keys) > 1:
                await asyncio.sleep(0.01)
                held = credentials.get(cloud)
        assert held.keys[0].seed == (new if kept == "new" else present).seed
