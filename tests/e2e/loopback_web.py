"""`paceline` for tests: research fetches pages from loopback addresses alone, at any port.

No setting of the programs leads here: it is this file, run in place of the program, that puts another fetcher in.
"""

from __future__ import annotations

from functools import partial

from paceline.commands.main import main
from paceline.core.addresses import Address
from paceline.rag.web import PageFetcher
from paceline.runtime.workflows import web


def is_loopback(address: Address) -> bool:
    return address.is_loopback


if __name__ == "__main__":
    web.PageFetcher = partial(  # type: ignore[misc, assignment]  # made there
        PageFetcher, allowed=is_loopback, ports=range(1, 65_536)
    )
    main()
