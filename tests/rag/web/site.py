"""A web server of a test, on every IPv4 address of this machine: 127.0.0.2 plays a public one, the others private ones.

It answers each path as it is told, byte by byte if need be, and keeps what was asked, by which address.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline.core.addresses import Address
from paceline.rag.web import DEFAULTS, FetchLimits, PageFetcher

usual_tls = functools.cache(httpx.create_ssl_context)  # reading the authorities takes longer than most tests

PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.1"

Reply: TypeAlias = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes = b"", content_type: str = "text/html", status: str = "200 OK", **headers: str) -> bytes:
    """An answer. Underscores in names of headers stand for hyphens; a header given as "" is left out."""
    lines = {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def leading_to(url: str, status: str = "302 Found") -> bytes:
    return reply(status=status, Location=url)


@dataclass(slots=True)
class Site:
    port: int = 0
    pages: dict[str, Reply] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # heads as they came
    addresses: set[str] = field(default_factory=set)  # of this machine, by which connections came
    names: list[str | None] = field(default_factory=list)  # asked for in TLS (SNI)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # the last client has gone
    answering: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def paths(self) -> list[str]:
        return [request.split(" ", 2)[1] for request in self.requests]

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self.answer(reader, writer))
        self.answering.add(task)
        task.add_done_callback(self.answering.discard)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            self.left.set()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.addresses.add(writer.get_extra_info("sockname")[0])
        with suppress(OSError, asyncio.IncompleteReadError):
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            page = self.pages.get(self.paths[-1].partition("?")[0], reply(status="404 Not Found"))
            if isinstance(page, bytes):
                writer.write(page)
                await writer.drain()
            else:
                await page(writer)
            await reader.read()


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    if tls is not None:
        tls.sni_callback = lambda _socket, name, _context: site.names.append(name)
    async with await asyncio.start_server(site.begin, "0.0.0.0", 0, ssl=tls) as server:
        site.port = server.sockets[0].getsockname()[1]
        yield site
        for task in site.answering:
            task.cancel()
        await asyncio.gather(*site.answering, return_exceptions=True)


class Names:
    """A resolver: for each name its answers, one after the other, the last one ever after."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): list(each) for name, each in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        del port
        self.asked.append(host)
        answers = self._answers.get(host, [[]])
        return answers.pop(0) if len(answers) > 1 else answers[0]


def is_played_public(address: Address) -> bool:
    return str(address) == PUBLIC


def fetcher(
    site: Site, names: Names | None = None, limits: FetchLimits = DEFAULTS, tls: ssl.SSLContext | None = None
) -> PageFetcher:
    """Fetches from the site's port, and from PUBLIC alone."""
    resolve = names or Names(pages_test=[[PUBLIC]])
    return PageFetcher(limits, resolve=resolve, allowed=is_played_public, ports={site.port}, tls=tls or usual_tls())


def certificate(directory: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS of a server with a certificate for this name, and of a client that believes that certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "site")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "site.pem").write_bytes(pem + secret)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(directory / "site.pem")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=pem.decode())
    return server, client
