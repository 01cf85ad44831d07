"""A listener that counts: whatever in a program fetches a URL, by itself or through a proxy, connects here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

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
