"""What `paceline doctor` says of the link to a cloud: it goes through the handshake, and links nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from device_agent import link_check
from device_agent.cloud import Credential, Credentials
from device_agent.link_check import cloud_link
from paceline.commands.options import Found
from paceline.runtime.identity import PrivateKey
from paceline.settings import AgentSettings, ServerSettings
from tests.api.scripted import WAIT
from tests.server.test_links import Site, site
from tests.wire.identities import DEVICE

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patience", "cheap_codes")]


async def look(state: Path, cloud: str | None, **more: object) -> Found:
    """As `doctor` does, on a thread without a loop."""
    settings = AgentSettings(state_dir=state, cloud=cloud, device="phone", **more)  # type: ignore[arg-type]  # any field
    check = cloud_link(settings)
    assert check is not None
    return await asyncio.to_thread(check)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_check, "ANSWER_S", WAIT)


@pytest.fixture
def same_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_check, "_tokenizer", lambda _: DEVICE.tokenizer)


async def enrolled(here: Site, state: Path) -> None:
    assert await here.agent(state, here.registry.add("phone"), lambda _: None).enrol()


def test_a_server_has_no_such_check_and_a_device_alone_needs_none() -> None:
    assert cloud_link(ServerSettings()) is None
    check = cloud_link(AgentSettings())
    assert check is not None and check()[0] == "ok"


@pytest.mark.usefixtures("same_tokenizer")
async def test_a_link_that_would_come_up_is_fine_and_one_that_is_up_stays(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        ours, _ = await here.linked(tmp_path / "agent", here.registry.add("phone"))
        status, text = await look(tmp_path / "agent", here.url)
        assert status == "ok" and "proves its key and knows phone" in text and "protocol version" in text
        assert not ours.closed.is_set() and here.peers.links.empty()


async def test_tokenizers_are_compared_where_the_model_is_here(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await enrolled(here, tmp_path)
        status, text = await look(tmp_path, here.url, model="fake")
        assert status == "ok" and "another vocabulary: this device reads its passages and writes by itself" in text
        status, text = await look(tmp_path, here.url, model=str(tmp_path / "nowhere"))
        assert status == "ok" and "compared once the model is here" in text


async def test_what_the_cloud_says_of_the_key_is_told(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await enrolled(here, tmp_path)
        kept = Credentials(tmp_path).get(here.url)
        assert kept is not None
        other = PrivateKey.generate()
        Credentials(tmp_path).put(here.url, Credential("phone", kept.server_key, (other,)))
        assert (await look(tmp_path, here.url))[0] == "fail"
        assert "does not know this device's key" in (await look(tmp_path, here.url))[1]
        Credentials(tmp_path).put(here.url, Credential("phone", other.public_key, kept.keys))
        assert "did not prove the key that this device pinned" in (await look(tmp_path, here.url))[1]
        Credentials(tmp_path).put(here.url, kept)
        here.registry.revoke("phone")
        assert "has revoked this device" in (await look(tmp_path, here.url))[1]


async def test_a_device_that_is_not_enrolled_is_told_how_to_be(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        status, text = await look(tmp_path, here.url)
        assert status == "fail" and "paceline devices add phone" in text
        status, text = await look(tmp_path, here.url, code="hello")
        assert status == "fail" and "cannot be one" in text
        code = here.registry.add("phone")
        status, text = await look(tmp_path, here.url, code=code)
        assert status == "warn" and "uses the code" in text and code not in text
        await here.linked(tmp_path, code)  # it holds still


async def test_a_cloud_that_cannot_be_reached_is_told_with_and_without_a_credential(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        status, text = await look(tmp_path, url)
        assert status == "fail" and "cannot reach" in text and "Nor is this device enrolled" in text
        keys = PrivateKey.generate(), PrivateKey.generate()
        Credentials(tmp_path).put(url, Credential("phone", keys[0].public_key, keys[1:]))
        status, text = await look(tmp_path, url)
        assert status == "warn" and "cannot reach" in text and "answers alone" in text
