"""A cloud whose certificate is not trusted here: told with what to do, once, by enrolment and by `doctor`."""

from __future__ import annotations

import asyncio
import logging
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
from paceline.errors import LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.settings import AgentSettings
from tests.api.scripted import WAIT
from tests.wire.identities import DEVICE

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patience", "cheap_codes")]
CODE = "K7QF-2M9X-4TBA-9HJC"
TOLD = "has a certificate that this machine does not trust (self-signed certificate)"


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_cloud, "TIMEOUT_S", WAIT)
    monkeypatch.setattr(link_check, "ANSWER_S", WAIT)


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
    """Of a server that ends every connection after its handshake, which none gets to."""
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
    check = cloud_link(AgentSettings(cloud=url, state_dir=tmp_path, model=("fake",)))
    assert check is not None
    status, text = await asyncio.to_thread(check)
    assert status == "fail" and TOLD in text and "SSL_CERT_FILE" in text
    key = PrivateKey.generate()
    Credentials(tmp_path).put(url, Credential("phone", key.public_key, (key,)))
    status, text = await asyncio.to_thread(check)
    assert status == "warn" and TOLD in text and "answers alone" in text


async def test_what_the_environment_trusts_is_trusted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    with pytest.raises(LinkClosed) as refused:
        await exchange(url, CODE)
    assert TOLD not in str(refused.value), "the connection is ended after the handshake"
