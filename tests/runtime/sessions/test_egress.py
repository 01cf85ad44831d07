"""Bytes that an answer sends, by kind of message."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest

from paceline.runtime.link import connection
from paceline.runtime.link.connection import SentToday
from paceline.runtime.sessions.driver import Egress
from paceline.wire.codec import encode
from paceline.wire.messages import CloseSession, Targets
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes
from tests.runtime.test_node_faults import ENDLESS, give_documents

pytestmark = pytest.mark.anyio


def test_only_sent_messages_are_counted_by_kind() -> None:
    egress = Egress()
    assert not egress
    for message in (Targets(1, 0, 0, [5], b""), Targets(1, 0, 1, [6], b""), CloseSession(1, "stop")):
        egress.sent(message, len(encode(message)))
    egress.sent(CloseSession(1, "stop"), 0)
    assert list(egress.stats()) == ["sent_close_bytes", "sent_targets_bytes"]
    assert egress.stats()["sent_close_bytes"] == len(encode(CloseSession(1, "stop")))
    assert "targets" in str(egress)


@pytest.mark.parametrize(("privacy", "more"), [("document-private", {"drafts"}), ("open", {"drafts", "weight"})])
async def test_each_side_reports_the_bytes_it_has_sent(
    privacy: str, more: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes() as (bench, _):
        give_documents(bench)
        request = changed(REQUEST, max_tokens=12, sampling=ENDLESS, options={"aggregator": "mixture"}, privacy=privacy)
        with caplog.at_level(logging.INFO, "paceline.session"):
            _, done = await collect(await bench.device.prepare(request))
            while sum("sent to the other side" in message for message in caplog.messages) < 2:
                await asyncio.sleep(0)  # the cloud receives the CloseSession
    sent = {stat.split("_")[1] for stat in done.stats if stat.startswith("sent_")}
    assert {"open", "targets", "close"} <= sent and ({"drafts", "weight"} & sent) == more
    cloud = next(message for message in caplog.messages if "found" in message)
    assert "drafts" in cloud and "weight" in cloud


def test_what_left_today_is_counted_by_hour_until_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.strptime("2026-03-01 22:10", "%Y-%m-%d %H:%M")
    monkeypatch.setattr(connection, "time", SimpleNamespace(strftime=lambda form: time.strftime(form, now)))
    today = SentToday()
    today.add("open", 5)
    today.add("open", 2)
    now = time.strptime("2026-03-01 23:00", "%Y-%m-%d %H:%M")
    today.add("drafts", 3)
    assert today.by_hour() == {"22": {"open": 7}, "23": {"drafts": 3}}
    now = time.strptime("2026-03-02 00:00", "%Y-%m-%d %H:%M")
    assert today.by_hour() == {}
