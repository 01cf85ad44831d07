"""Bytes on links, for the metrics of a side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypedDict

from paceline.runtime.link.connection import Link
from paceline.runtime.service import LinkState


class LinkLoad(TypedDict):
    """The fields of `Load` that tell of links."""

    links: int
    rtt_s: float | None
    sent_bytes: int
    received_bytes: int


def link_states(links: Mapping[str, Link]) -> tuple[LinkState, ...]:
    """What is shown of links that are up, by the name of the peer."""
    found = sorted(links.items())
    return tuple(LinkState(name, link.rtt, link.bandwidth, dict(link.sent_bytes)) for name, link in found)


class LinkTotals:
    """Bytes on all links of a node since its start."""

    def __init__(self) -> None:
        self._sent = 0  # on links that are down
        self._received = 0

    def ended(self, link: Link) -> None:
        """Count a link that is down, once."""
        self._sent += link.traffic.sent_bytes
        self._received += link.traffic.received_bytes

    def load(self, links: Collection[Link]) -> LinkLoad:
        """links: those that are up."""
        return LinkLoad(
            links=len(links),
            rtt_s=max((link.rtt for link in links if link.rtt is not None), default=None),
            sent_bytes=self._sent + sum(link.traffic.sent_bytes for link in links),
            received_bytes=self._received + sum(link.traffic.received_bytes for link in links),
        )
