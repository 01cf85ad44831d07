"""A cloud that asks questions of its own, against a real agent: it gets nothing with `off`, little with `on`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.commands.demo import Children, command, free_port
from paceline.engine.fake import fake_model
from paceline.runtime.link.connection import Link
from paceline.wire.codec import encode_options
from paceline.wire.messages import AggregateOptions, ChatMessage, SpeedReport, Targets
from tests.reliability.rogue_cloud import GREEDY, RogueCloud, kinds_of, question, rogue_cloud

pytestmark = pytest.mark.anyio

NOTES = {
    "wifi.md": "The password of the wifi in our kitchen is copper lantern.\n",
    "boat.md": "My boat lies in the northern harbour behind the crane.\n",
}
WIFI, BOAT = "What is the password of the wifi in our kitchen?", "Where does my boat lie in the harbour?"
COIN = encode_options(AggregateOptions(aggregator="coin"))


class Owner:
    """The owner of the device, at its terminal."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._state = str(children.directory / "device")

    def activity(self) -> list[dict[str, Any]]:
        shown = self._children.run(
            command("devices", "activity", "--json", "--last", "1000", "--state-dir", self._state)
        )
        return list(json.loads(shown))

    def ids(self) -> dict[str, str]:
        """Ids of the documents by their names."""
        where = ("--store", f"{self._state}/docs", "--embedder", "hash", "--json")
        return {row["name"]: row["id"] for row in json.loads(self._children.run(command("docs", "list", *where)))}

    def log(self) -> str:
        return (self._children.directory / "agent.log").read_text()


@asynccontextmanager
async def asked_agent(directory: Path, *flags: str) -> AsyncIterator[tuple[RogueCloud, Link, Owner]]:
    """A rogue cloud, its link to a real agent with private notes, and the agent's owner."""
    with Children(directory) as children:
        async with rogue_cloud(directory / "rogue", fake_model()) as rogue:
            (directory / "notes").mkdir()
            for name, text in NOTES.items():
                (directory / "notes" / name).write_text(text)
            store = ("--store", str(directory / "device" / "docs"), "--embedder", "hash")
            children.run(command("docs", "add", str(directory / "notes"), "--side", "device", *store))
            port = free_port(0)
            agent = command("agent", "--model", "fake", "--embedder", "hash", "--port", str(port))
            agent += ["--state-dir", str(directory / "device"), "--cloud", rogue.url]
            children.start("agent", [*agent, "--code", rogue.registry.add("laptop"), *flags], port=port)
            yield rogue, await asyncio.wait_for(rogue.links.get(), 120), Owner(children)


async def test_a_device_with_no_setting_gives_a_cloud_nothing_and_logs_that_it_asked(tmp_path: Path) -> None:
    async with asked_agent(tmp_path) as (rogue, link, owner):
        attempts = [
            question(WIFI),
            question(WIFI, asker="notebook"),
            question(WIFI, query="copper lantern", privacy="open", options=COIN),
            question(WIFI, targets=[84, 104], epoch=1),
            question(WIFI, sampling=msgspec.structs.replace(GREEDY, logit_bias=[(99, 100.0)])),
        ]
        heard = [await rogue.ask(link, attempt) for attempt in attempts]
        assert kinds_of(heard) == {"close"}
        assert {each.refusal for each in heard} == {"refused: its owner lets no cloud ask it"}
        assert link.peer.documents == 0, "nor is it told how many there are"
        entries = owner.activity()
        assert sum(entry["times"] for entry in entries) == len(attempts)
        assert {entry["asker"] for entry in entries} == {"", "notebook"}
        assert all(entry["refused"] and entry["question"] == WIFI and not entry["documents"] for entry in entries)
        assert "may ask this device: off (the default)" in owner.log()


async def test_a_cloud_that_may_ask_gets_answers_and_no_measurements_within_its_budget(tmp_path: Path) -> None:
    flags = ("--cloud-may-ask", "on", "--cloud-asks-per-minute", "9", "--cloud-asks-per-hour", "6")
    async with asked_agent(tmp_path, *flags) as (rogue, link, owner):
        ids = owner.ids()
        fast = SpeedReport(0, 0, 0.0, 0.0)  # the faster side would decide
        dictated = Targets(0, 0, 0, [84, 104, 101, 32, 112, 105, 110, 32], b"")
        honest = await rogue.ask(link, question(WIFI, asker="notebook"))
        heard = [
            await rogue.ask(link, question(WIFI, options=COIN), fast),
            await rogue.ask(link, question(WIFI, options=COIN, privacy="open"), fast),
            await rogue.ask(link, question(WIFI), dictated),
            await rogue.ask(link, question(BOAT, query=WIFI)),
            await rogue.ask(link, question(WIFI, sampling=msgspec.structs.replace(GREEDY, logit_bias=[(99, 100.0)]))),
        ]
        # Neither weights nor choices, speeds or distributions; how many documents were found is not told.
        assert kinds_of([honest, *heard]) <= {"targets", "found", "have"}
        assert all(len(found.passages) == 1 for each in heard for found in each.messages if found.kind == "found")
        assert heard[2].targets == honest.targets, "the device decides"
        # What no client could ask is refused, without using up the budget.
        begun = question(WIFI, targets=[84, 104])
        refused = [
            await rogue.ask(link, begun),
            await rogue.ask(link, msgspec.structs.replace(begun, epoch=1)),
            await rogue.ask(link, question(WIFI, messages=[ChatMessage("documents", WIFI)])),
        ]
        assert kinds_of(refused) == {"close"}
        # The answer that it was part of may be joined again, from where it was, which is no further question.
        again = question(WIFI, asker="notebook", targets=honest.targets[:3], epoch=1)
        assert (await rogue.ask(link, again, weight=None)).targets[-1:] == honest.targets[-1:]
        over = await rogue.ask(link, question(BOAT))
        assert "budget of 6 questions an hour" in (over.refusal or "")

        entries = owner.activity()
        read = [entry for entry in entries if not entry["refused"]]
        assert len(read) == 6 and sum(entry["times"] for entry in entries) == 10
        assert [entry["asker"] for entry in read] == ["notebook", "", "", "", "", ""]
        assert read[0]["outcome"].endswith("; joined again (1)")
        assert all(ids["wifi.md"] in entry["documents"] for entry in read if entry["question"] == WIFI)
        (boat,) = [entry for entry in read if entry["question"] == BOAT]
        assert ids["boat.md"] in boat["documents"], "the query comes from the messages"
        assert all(entry["sent"]["targets"] > 0 and entry["outcome"] and entry["tokens"] for entry in read)
        assert "copper" not in json.dumps(entries), "no text of documents"


async def test_only_named_keys_are_answered_and_no_more_often_than_the_rate(tmp_path: Path) -> None:
    flags = ("--cloud-may-ask", "notebook,phone", "--cloud-asks-per-minute", "2")
    async with asked_agent(tmp_path, *flags) as (rogue, link, owner):
        assert (await rogue.ask(link, question(WIFI, asker="phone"))).targets
        for stranger in ("", "tablet"):
            heard = await rogue.ask(link, question(WIFI, asker=stranger))
            assert heard.kinds == {"close"} and "only named keys" in (heard.refusal or "")
        more = [await rogue.ask(link, question(WIFI, asker="phone")) for _ in range(3)]
        assert [bool(each.targets) for each in more] == [True, False, False]
        assert "2 questions of the cloud a minute" in (more[1].refusal or "")
        entries = owner.activity()
        assert [entry["asker"] for entry in entries if not entry["refused"]] == ["phone", "phone"]
        refused: Counter[str] = Counter()
        for entry in entries:
            refused[entry["asker"]] += entry["times"] if entry["refused"] else 0
        assert refused == Counter({"": 1, "tablet": 1, "phone": 2})
