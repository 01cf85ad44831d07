"""Examples for Caddy in the words of the one that is installed: Debian's is older than their `request_buffers`."""

from __future__ import annotations

import re
import subprocess


def as_installed(text: str) -> str:
    said = subprocess.run(["caddy", "version"], capture_output=True, text=True, check=True).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:3]))
    return text if version >= (2, 6, 4) else re.sub(r"request_buffers \S+", "buffer_requests", text)
