"""A listener that counts: whatever in a program fetches a URL, by itself or through a proxy, connects here.

And a server that has it as its proxy for every URL, so that an address elsewhere (a cloud's metadata service, a decimal
or rebound address) is counted as well, whichever library fetches it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from paceline.commands.demo import Children
from tests.e2e.pair import started

FETCH = "import urllib.request as u; u.urlopen('http://192.0.2.1/control', timeout=20)"  # an address of nobody's


@dataclass(slots=True)
class Listener:
    port: int
    connects: int = 0

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which programs fetch every URL, of this machine too, through the listener."""
        proxy = f"http://127.0.0.1:{self.port}"
        names = ("http_proxy", "https_proxy", "all_proxy")
        return {key: proxy for name in names for key in (name, name.upper())} | {"no_proxy": "", "NO_PROXY": ""}

    def counts(self) -> bool:
        """True if a fetch by another program, of an address that is not this machine's, is counted."""
        before = self.connects
        subprocess.run([sys.executable, "-c", FETCH], env={**os.environ, **self.environment}, capture_output=True)
        counted, self.connects = self.connects > before, before
        return counted


@contextmanager
def listening() -> Iterator[Listener]:
    """A listener on every address of this machine, which hangs up at once."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        listener = Listener(server.getsockname()[1])

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    listener.connects += 1
                    connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@dataclass(slots=True)
class Heard:
    """A server whose every fetch is heard."""

    http: httpx.Client
    process: psutil.Process
    listener: Listener


@contextmanager
def heard_server(directory: Path) -> Iterator[Heard]:
    with listening() as listener, Children(directory) as children:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in listener.environment.items():
                patch.setenv(name, value)
            server = started(children, "cloud", "serve")
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as http:
            yield Heard(http, psutil.Process(server.process.pid), listener)
        log = server.log.read_text("utf-8", "replace")
        assert "Traceback" not in log, log
