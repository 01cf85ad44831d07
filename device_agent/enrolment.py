"""Enrolment at a cloud: a new key of this device in exchange for the cloud's, both authenticated by a one-time code."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import secrets
import ssl
from urllib.parse import urlsplit

import httpx
import msgspec

from paceline.core.addresses import is_loopback
from paceline.core.printable import printable
from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.identity import PrivateKey, verify
from paceline.runtime.link.transport import unreachable
from paceline.wire.identity import (
    BY_CODE,
    BY_DEVICE,
    CodeSecrets,
    EnrolmentRequest,
    answer_bytes,
    answer_mac,
    code_secrets,
    request_bytes,
)
from paceline.wire.messages import NONCE_BYTES

from .credentials import Credential

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 65_536
MAX_SENTENCE = 400  # characters of a server's refusal that are shown


async def exchange(cloud: str, code: str) -> Credential:
    """Enrol at a cloud, given by its base URL over HTTP.

    Raises LinkClosed when the cloud cannot be reached now, ConfigError when it refuses, or does not know the code.
    """
    try:
        derived = await asyncio.to_thread(code_secrets, code)
    except ValueError as error:
        raise ConfigError(f"What was given as the code cannot be one: {error}.") from None
    key = PrivateKey.generate()
    request = _request(derived, key)
    status, body = await _post(f"{cloud}/v1/devices/enrol", _to_json(request))
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


def _to_json(request: EnrolmentRequest) -> dict[str, object]:
    made: dict[str, object] = msgspec.to_builtins(request)  # bytes in base64
    return made


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
    except (httpx.TransportError, httpx.InvalidURL, TimeoutError) as error:
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
