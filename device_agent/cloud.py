"""This device at a cloud: its credential there, enrolment by a one-time code, and a link that is redialled.

Credentials are a JSON file of mode 0600 with an entry for each cloud, by its URL. One that others can read is refused,
as ssh does with its keys. Enrolment exchanges a new key of this device for the cloud's, both authenticated by the code.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import random
import secrets
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec

from paceline.core.addresses import is_loopback
from paceline.core.printable import printable
from paceline.errors import ConfigError, LinkClosed, other_format
from paceline.runtime.identity import PrivateKey, device_handshake, verify
from paceline.runtime.link.connection import Dialer, Link, back_off
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.link.transport import UNUSABLE, unreachable
from paceline.secret_files import private_folder, read_private, write_private
from paceline.wire.identity import (
    BY_CODE,
    BY_DEVICE,
    CodeSecrets,
    DiallerHandshake,
    EnrolmentRequest,
    answer_bytes,
    answer_mac,
    code_secrets,
    request_bytes,
)
from paceline.wire.messages import KEY_BYTES, MAX_KEYS, NONCE_BYTES, Introduction

FILE = "credentials.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Credential:
    """Names and keys by which this device links to one cloud."""

    device: str  # the name its owner gave it at the server
    server_key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]  # pinned when it enrolled
    # The present one, and one whose renewal is not confirmed.
    keys: Annotated[tuple[PrivateKey, ...], msgspec.Meta(min_length=1, max_length=MAX_KEYS)] = field(repr=False)


class _Format(msgspec.Struct):
    format: int | float | str | None


class _File(_Format):
    clouds: dict[str, Credential]


class Credentials:
    """The file in a state directory. Methods raise ConfigError when only a person can repair it."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE

    def get(self, cloud: str) -> Credential | None:
        return self._read().get(cloud)

    def put(self, cloud: str, credential: Credential) -> None:
        try:
            private_folder(self.path.parent)
            file = _File(FORMAT, self._read() | {cloud: credential})
            content = msgspec.json.encode(file, enc_hook=lambda key: key.seed)  # bytes are written in base64
            write_private(self.path, msgspec.json.format(content))
        except OSError as error:
            raise ConfigError(f"The credential cannot be kept in {self.path}: {error.strerror}.") from error

    def _read(self) -> dict[str, Credential]:
        content = read_private(self.path, otherwise="have the device revoked and enrol it again")
        if content is None:
            return {}
        try:
            found = msgspec.json.decode(content, type=_Format).format
            if found != FORMAT:
                raise other_format(self.path, found, FORMAT, "remove the file and enrol the device again")
            hook = lambda _, seed: PrivateKey(base64.b64decode(seed, validate=True))  # noqa: E731
            return msgspec.json.decode(content, type=_File, dec_hook=hook).clouds
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.path} is damaged: remove it and enrol the device again.") from error


class CloudKeys:
    """This device's keys for one cloud: what the link needs of them, and their renewal (a `KeyStore`)."""

    def __init__(self, credentials: Credentials, cloud: str, credential: Credential) -> None:
        self.credential = credential
        self._credentials = credentials
        self._cloud = cloud

    async def make_key(self) -> PrivateKey:
        present, *unconfirmed = self.credential.keys
        if not unconfirmed:
            await self._keep((present, PrivateKey.generate()))
        return self.credential.keys[-1]

    async def settle(self, public_key: bytes) -> None:
        await self._keep(tuple(key for key in self.credential.keys if key.public_key == public_key))

    async def _keep(self, keys: tuple[PrivateKey, ...]) -> None:
        """Store these keys, twice a day. In a thread the write could outlive its link, and undo a later one."""
        kept = Credential(self.credential.device, self.credential.server_key, keys)
        self._credentials.put(self._cloud, kept)
        self.credential = kept


TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 65_536
MAX_SENTENCE = 400  # characters of a server's refusal that are shown


async def exchange(cloud: str, code: str, key: PrivateKey | None = None) -> Credential:
    """Enrol at a cloud, given by its base URL over HTTP.

    key: the device's, a new one by default. A code that has enrolled it, with an answer that was lost, does so again.
    Raises LinkClosed when the cloud cannot be reached now, ConfigError when it refuses, or does not know the code.
    """
    try:
        derived = await asyncio.to_thread(code_secrets, code)
    except ValueError as error:
        raise ConfigError(f"What was given as the code cannot be one: {error}.") from None
    key = key or PrivateKey.generate()
    request = _request(derived, key)
    asked = f"{cloud}/v1/devices/enrol", msgspec.to_builtins(request)  # bytes in base64
    try:
        status, body = await _post(*asked)
    except LinkClosed:
        status, body = await _post(*asked)
    if status >= 500 or status == 429:
        raise LinkClosed(f"{cloud} cannot enrol now: it answered {status}")
    if status != 200:
        raise ConfigError(f"{cloud} did not enrol this device ({status}). {_sentence(body)}")
    return _checked(cloud, derived, request, key, body)


def _request(derived: CodeSecrets, key: PrivateKey) -> EnrolmentRequest:
    nonce = secrets.token_bytes(NONCE_BYTES)
    by_code = PrivateKey(derived.seed).sign(request_bytes(BY_CODE, derived.id, key.public_key, nonce))
    by_device = key.sign(request_bytes(BY_DEVICE, derived.id, key.public_key, nonce))
    return EnrolmentRequest(derived.id, key.public_key, nonce, by_code, by_device)


async def _post(url: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    """Status and JSON object of the answer; an empty one for anything else, or more than MAX_ANSWER_BYTES."""
    content = b""
    try:
        # A proxy named by the environment is used, except for this machine itself.
        loopback = is_loopback(urlsplit(url).hostname or "")
        trusted = ssl.create_default_context()  # what the system trusts, as for the link; not httpx's own list
        async with (
            asyncio.timeout(TIMEOUT_S),  # the whole of it: httpx counts the time between two pieces only
            httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=not loopback, verify=trusted) as http,
            http.stream("POST", url, json=body, headers={"accept-encoding": "identity"}) as answer,
        ):
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    return answer.status_code, {}
    except (httpx.TransportError, *UNUSABLE, TimeoutError) as error:
        raise LinkClosed(unreachable(url, error)) from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    return answer.status_code, found if isinstance(found, dict) else {}


def _checked(
    cloud: str, derived: CodeSecrets, request: EnrolmentRequest, key: PrivateKey, body: dict[str, object]
) -> Credential:
    """The credential of an answer by the server that issued the code. Raises ConfigError for any other answer."""
    try:
        device = body["device"]
        server_key, mac, signature = (
            base64.b64decode(str(body[name]), validate=True) for name in ("server_key", "mac", "signature")
        )
    except (KeyError, ValueError):
        raise ConfigError(f"{cloud} did not enrol this device. {_sentence({})}") from None
    signed = answer_bytes(request, str(device), server_key)
    right = hmac.compare_digest(mac, answer_mac(derived.mac_key, signed))
    if not right or not verify(server_key, signature, signed):
        raise ConfigError(
            f"The answer of {cloud} does not come from the server that issued the code: somebody is in between. "
            "Nothing was kept; revoke the device at the server."
        )
    return Credential(str(device), server_key, (key,))


def _sentence(body: dict[str, object]) -> str:
    """The server's reason, which a stranger may have written."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str) or not message:
        return "Is it a Paceline server, of the same release?"
    return printable(message[:MAX_SENTENCE])


_log = logging.getLogger("paceline.agent")


def http_url(cloud: str) -> str:
    """The cloud's base URL over HTTP. Also the key of its entry in `Credentials`."""
    return _with_scheme(cloud, {"ws": "http", "wss": "https"})


def link_url(cloud: str) -> str:
    return f"{_with_scheme(cloud, {'http': 'ws', 'https': 'wss'})}/v1/link"


def _with_scheme(cloud: str, schemes: dict[str, str]) -> str:
    url = urlsplit(cloud)
    netloc = url.netloc.lower()
    return urlunsplit((schemes.get(url.scheme, url.scheme), netloc, url.path.rstrip("/"), "", ""))


@dataclass(eq=False, repr=False)  # a code is a secret
class Cloud:
    """Keep this device enrolled and linked."""

    urls: Sequence[str]  # of servers that share a database, one at least; any of them will do
    credentials: Credentials
    _: KW_ONLY
    code: str | None
    name: str
    introduce: Callable[[], Introduction]  # describes the device at each attempt
    up: Callable[[Link], None]
    emulation: Emulation | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        known = (url for url in self.urls if self.credentials.get(http_url(url)) is not None)
        self._url = next(known, self.urls[0])  # its entry's
        self._credential: Credential | None = None
        self._fault = ""  # why it is not enrolled yet
        self._key = PrivateKey.generate()  # of all attempts: the answer of one may be lost

    async def enrol(self) -> bool:
        """Get a credential; False if there is none yet because the cloud cannot be reached.

        A code is used even where a credential is stored: it may have been issued after a revocation. Raises ConfigError
        when no credential is stored and there is no code or the cloud refuses it.
        """
        advice = f"Run `paceline devices add {self.name}` at the server and start the agent once with `--code -`."
        kept = self.credentials.get(http_url(self._url))
        if self.code is None:
            if kept is None:
                raise ConfigError(f"This device is not enrolled at {self._url}. {advice}")
            self._credential = kept
            return True
        try:
            fresh = await self._exchanged(self.code)
        except LinkClosed as error:
            if str(error) != self._fault:  # once, not at every attempt
                _log.warning("not enrolled yet: %s", error)
            self._fault = str(error)
            self._credential = kept
        except ConfigError as error:
            if kept is None:
                raise
            self._credential = kept  # the code was probably used at an earlier start
            _log.info("the enrolment of an earlier start is used: %s", error)
        else:
            self.credentials.put(http_url(self._url), fresh)
            self._credential, self.code = fresh, None
            _log.info("enrolled at %s as %s", self._url, fresh.device)
        return self._credential is not None

    async def _exchanged(self, code: str) -> Credential:
        """By the first server that can be reached. Raises as `exchange`."""
        *others, last = self.urls
        for url in others:
            with suppress(LinkClosed):
                return await exchange(http_url(url), code, self._key)
        return await exchange(http_url(last), code, self._key)

    async def keep_linked(self) -> None:
        """Keep the link open until cancelled, enrolling first if that has not been possible yet.

        Returns when the cloud refuses the enrolment.
        """
        failures = 0
        while self._credential is None:
            await asyncio.sleep(back_off(failures, random.random()))
            failures += 1
            try:
                await self.enrol()
            except ConfigError as error:
                _log.error("%s This device answers alone.", error)
                return
        keys = CloudKeys(self.credentials, http_url(self._url), self._credential)

        def handshake() -> DiallerHandshake:
            shown = keys.credential
            return device_handshake(self.introduce(), device=shown.device, keys=shown.keys, server_key=shown.server_key)

        first, *others = map(link_url, self.urls)
        dialer = Dialer(
            first,
            handshake,
            others=others,
            key_store=keys,
            up=self.up,
            emulation=self.emulation,
            vocab_size=self.vocab_size,
        )
        await dialer.run()
