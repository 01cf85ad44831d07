"""Where a cited passage can be seen: a page of the side that has it, which shows it to whoever may read it.

A device's passage has no address but on the device itself: a cloud's client is told only that there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.requests import Request

from paceline.runtime.service import Citation

PATH = "/passage"  # of the page


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the two sides, as clients of this one reach them."""

    public: str = ""  # of this side; empty: as each client addresses it
    cloud: str = ""  # of the other side, on a device

    def links(self, request: Request) -> PassageLinks:
        return PassageLinks(self.public or str(request.base_url), self.cloud)


@dataclass(frozen=True, slots=True)
class PassageLinks:
    """Addresses of passages in one answer."""

    here: str = ""  # of this side
    there: str = ""  # of the other side; empty where its clients are others

    def url(self, citation: Citation) -> str:
        """Address of the cited passage or web page; where it cannot be opened from here, one that only names it."""
        for base, chunk in ((self.here, citation.chunk_id), (self.there, citation.peer_chunk)):
            if base and chunk is not None and not citation.url:
                return f"{base.rstrip('/')}{PATH}?id={chunk}"
        return citation.url or f"paceline://{citation.side}/{quote(citation.document, safe='')}"


NO_LINKS: Final = PassageLinks()
NO_ADDRESSES: Final = Addresses()
