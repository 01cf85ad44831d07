"""The setting `web_search`: what the workflow `research` searches the web with. Knows nothing of searching."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

STORE: Final = "store"  # the cloud's public documents stand for the web


def provider(value: str | None) -> str | None:
    """The setting as given, if it may be. Raises ValueError with a sentence."""
    if value is None or value == STORE:
        return value
    try:
        url = urlsplit(value)
        named = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        named = False
    if not named:
        raise ValueError("must be the URL of a SearXNG server, such as http://127.0.0.1:8080, or store")
    return value.rstrip("/")
