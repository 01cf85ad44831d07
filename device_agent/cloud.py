"""Connection to a cloud: enrolment by one-time code, and a link that is redialled as long as the program runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

import httpx

from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.link.dialer import Dialer, Link, back_off
from paceline.runtime.link.emulation import Emulation
from paceline.settings import is_loopback
from paceline.wire.messages import Hello

from .credentials import Credential, Credentials

ENROL_TIMEOUT_S = 10.0

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


async def exchange(cloud: str, code: str, name: str) -> Credential:
    """Exchange a one-time code for a credential.

    Raises LinkClosed when the cloud cannot be reached now, ConfigError when it refuses.
    """
    url = f"{http_url(cloud)}/v1/devices/enrol"
    host = urlsplit(url).hostname or ""
    try:
        # A proxy named by the environment is used, except for this machine itself.
        async with httpx.AsyncClient(timeout=ENROL_TIMEOUT_S, trust_env=not is_loopback(host)) as http:
            answer = await http.post(url, json={"code": code, "name": name[:256]})
        body: object = answer.json() if answer.content else {}
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise LinkClosed(f"cannot reach {url}: {error}") from error
    except ValueError:
        body = {}
    if answer.status_code >= 500 or answer.status_code == 429:
        raise LinkClosed(f"{url} cannot enrol now: it answered {answer.status_code}")
    if answer.status_code != 200 or not isinstance(body, dict):
        error_body = body.get("error") if isinstance(body, dict) else None
        sentence = error_body.get("message") if isinstance(error_body, dict) else "Is it a Paceline server?"
        raise ConfigError(f"{http_url(cloud)} did not enrol this device ({answer.status_code}). {sentence}")
    return Credential(str(body.get("device", "")), str(body.get("credential", "")))


class Cloud:
    """Keep this device enrolled and linked. `hello` makes the link's first message, which describes the device."""

    def __init__(
        self,
        url: str,
        credentials: Credentials,
        *,
        code: str | None,
        name: str,
        hello: Callable[[Credential], Hello],
        up: Callable[[Link], None],
        emulation: Emulation | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._url = url
        self._credentials = credentials
        self._code = code
        self._name = name
        self._hello = hello
        self._up = up
        self._emulation = emulation
        self._vocab_size = vocab_size
        self._credential: Credential | None = None

    async def enrol(self) -> bool:
        """Get a credential; False if there is none yet because the cloud cannot be reached.

        A code is used even where a credential is stored: it may have been issued after a revocation. Raises ConfigError
        when no credential is stored and there is no code or the cloud refuses it.
        """
        kept = self._credentials.get(http_url(self._url))
        if self._code is None:
            if kept is None:
                raise ConfigError(
                    f"This device is not enrolled at {self._url}: run `paceline devices add {self._name}` at the "
                    "server and start the agent once with --code."
                )
            self._credential = kept
            return True
        try:
            fresh = await exchange(self._url, self._code, self._name)
        except LinkClosed as error:
            _log.warning("not enrolled yet: %s", error)
            self._credential = kept
        except ConfigError:
            if kept is None:
                raise
            self._credential = kept  # the code was probably used at an earlier start
        else:
            self._credentials.put(http_url(self._url), fresh)
            self._credential, self._code = fresh, None
            _log.info("enrolled at %s as %s", self._url, fresh.device)
        return self._credential is not None

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
        shown = self._credential
        dialer = Dialer(
            link_url(self._url),
            lambda: self._hello(shown),
            up=self._up,
            emulation=self._emulation,
            vocab_size=self._vocab_size,
        )
        await dialer.run()
