"""Connection to a cloud: enrolment by one-time code, and a link that is redialled as long as the program runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.identity import device_handshake
from paceline.runtime.link.connection import Link
from paceline.runtime.link.dialer import Dialer, back_off
from paceline.runtime.link.emulation import Emulation
from paceline.wire.identity import DiallerHandshake
from paceline.wire.messages import Introduction

from .credentials import CloudKeys, Credential, Credentials
from .enrolment import exchange

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


class Cloud:
    """Keep this device enrolled and linked. `introduce` describes the device at each attempt."""

    def __init__(
        self,
        urls: Sequence[str],
        credentials: Credentials,
        *,
        code: str | None,
        name: str,
        introduce: Callable[[], Introduction],
        up: Callable[[Link], None],
        emulation: Emulation | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """urls: of servers that share a database, one at least; any of them will do."""
        self._urls = urls
        self._url = next((url for url in urls if credentials.get(http_url(url)) is not None), urls[0])  # its entry's
        self._credentials = credentials
        self._code = code
        self._name = name
        self._introduce = introduce
        self._up = up
        self._emulation = emulation
        self._vocab_size = vocab_size
        self._credential: Credential | None = None
        self._fault = ""  # why it is not enrolled yet

    async def enrol(self) -> bool:
        """Get a credential; False if there is none yet because the cloud cannot be reached.

        A code is used even where a credential is stored: it may have been issued after a revocation. Raises ConfigError
        when no credential is stored and there is no code or the cloud refuses it.
        """
        advice = f"Run `paceline devices add {self._name}` at the server and start the agent once with `--code -`."
        kept = self._credentials.get(http_url(self._url))
        if self._code is None:
            if kept is None:
                raise ConfigError(f"This device is not enrolled at {self._url}. {advice}")
            self._credential = kept
            return True
        try:
            fresh = await self._exchanged(self._code)
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
            self._credentials.put(http_url(self._url), fresh)
            self._credential, self._code = fresh, None
            _log.info("enrolled at %s as %s", self._url, fresh.device)
        return self._credential is not None

    async def _exchanged(self, code: str) -> Credential:
        """By the first server that can be reached. Raises as `exchange`."""
        *others, last = self._urls
        for url in others:
            with suppress(LinkClosed):
                return await exchange(http_url(url), code)
        return await exchange(http_url(last), code)

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
        keys = CloudKeys(self._credentials, http_url(self._url), self._credential)

        def handshake() -> DiallerHandshake:
            shown = keys.credential
            return device_handshake(
                self._introduce(), device=shown.device, keys=shown.keys, server_key=shown.server_key
            )

        first, *others = map(link_url, self._urls)
        dialer = Dialer(
            first,
            handshake,
            others=others,
            key_store=keys,
            up=self._up,
            emulation=self._emulation,
            vocab_size=self._vocab_size,
        )
        await dialer.run()
