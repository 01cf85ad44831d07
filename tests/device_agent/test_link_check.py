"""What `paceline doctor` says of the link to a cloud: it goes through the handshake, and links nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from device_agent import cloud as at_cloud
from device_agent import link_check
from device_agent.cloud import Cloud, Credential, Credentials, exchange
from device_agent.link_check import cloud_link
from paceline.commands.options import Found
from paceline.errors import LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.settings import AgentSettings, ServerSettings
from paceline.system import PROXY
from tests.api.scripted import WAIT
from tests.server.test_links import Site, site
from tests.wire.identities import DEVICE

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patience", "cheap_codes")]


async def look(state: Path, cloud: str | None, **more: object) -> Found:
    """As `doctor` does, on a thread without a loop."""
    settings = AgentSettings(state_dir=state, cloud=cloud, device="phone", **more)  # type: ignore[arg-type]  # any field
    found = await asyncio.to_thread(cloud_link, settings)
    assert found is not None
    return found


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_cloud, "TIMEOUT_S", WAIT)
    monkeypatch.setattr(link_check, "ANSWER_S", WAIT)


@pytest.fixture
def same_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_check, "_tokenizer", lambda _: DEVICE.tokenizer)


async def enrolled(here: Site, state: Path) -> None:
    assert await here.agent(state, here.registry.add("phone"), lambda _: None).enrol()


def test_a_server_has_no_such_check_and_a_device_alone_needs_none() -> None:
    assert cloud_link(ServerSettings()) is None
    found = cloud_link(AgentSettings())
    assert found is not None and found[0] == "ok"


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


async def check_told(state: Path, url: str, why: str, advice: str) -> None:
    """Doctor tells why there is no link to this cloud, with and without a credential."""
    status, text = await look(state, url)
    assert status == "fail" and why in text and advice in text
    key = PrivateKey.generate()
    Credentials(state).put(url, Credential("phone", key.public_key, (key,)))
    status, text = await look(state, url)
    assert status == "warn" and why in text and "answers alone" in text


async def test_a_cloud_that_cannot_be_reached_is_told_with_and_without_a_credential(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        await check_told(tmp_path, url, "cannot reach", "Nor is this device enrolled")


@pytest.mark.parametrize(
    "proxy", ["socks5://me:secret@127.0.0.1:9", "ftp://me:secret@127.0.0.1", "http://me:secret@127.0.0.1:none"]
)
async def test_a_proxy_of_the_environment_that_cannot_be_used_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    for name in filter(PROXY.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    url = "https://nosuch.example.invalid"
    await check_told(tmp_path, url, "the proxy that HTTPS_PROXY names cannot be used", "NO_PROXY")
    with pytest.raises(LinkClosed, match="HTTPS_PROXY") as refused:
        await exchange(url, CODE)
    assert "secret" not in str(refused.value)


async def test_a_proxy_of_the_environment_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*filter(PROXY.fullmatch, list(os.environ)), "NO_PROXY", "no_proxy"]:
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{closed.getsockname()[1]}")
        url = "https://nosuch.example.invalid"
        await check_told(tmp_path, url, "cannot reach", "through the proxy that HTTPS_PROXY or ALL_PROXY names")


# ---- a cloud whose certificate is not trusted here: told once, by enrolment and by doctor ----------------------------
CODE = "K7QF-2M9X-4TBA-9HJC"
TOLD = "has a certificate that this machine does not trust (self-signed certificate)"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for localhost and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = folder / "certificate.pem", folder / "key.pem"
    for file, content in zip(files, (certificate, secret), strict=True):
        file.write_bytes(content)
    return files


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A server that ends every connection after its handshake, which none gets to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*self_signed(tmp_path))

    async def ended(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(ended, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"


async def test_enrolment_tells_what_to_do_and_tells_it_once(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LinkClosed) as refused:
        await exchange(url, CODE)
    assert TOLD in str(refused.value) and "SSL_CERT_FILE" in str(refused.value)
    cloud = Cloud([url], Credentials(tmp_path), code=CODE, name="phone", introduce=lambda: DEVICE, up=lambda _: None)
    with caplog.at_level(logging.WARNING, "paceline.agent"):
        assert [await cloud.enrol() for _ in range(3)] == [False] * 3
    assert len([record for record in caplog.records if TOLD in record.getMessage()]) == 1


async def test_doctor_tells_what_to_do_with_and_without_a_credential(url: str, tmp_path: Path) -> None:
    await check_told(tmp_path, url, TOLD, "SSL_CERT_FILE")


async def test_what_the_environment_trusts_is_trusted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    with pytest.raises(LinkClosed) as refused:
        await exchange(url, CODE)
    assert TOLD not in str(refused.value), "the connection is ended after the handshake"


async def test_an_https_address_of_a_port_without_is_told() -> None:
    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        with pytest.raises(LinkClosed, match="does not speak https: give"):
            await exchange(f"https://localhost:{server.sockets[0].getsockname()[1]}", CODE)
