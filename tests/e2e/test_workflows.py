"""Workflows of a real pair with the demonstration models, asked by clients on either side.

Its web is a SearXNG and a page that are served on loopback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from openai import OpenAI

from paceline.commands import demo
from paceline.strategies.base import Side
from tests.e2e import loopback_web
from tests.e2e.pair import QUESTION, Pair, running_pair
from tests.stand_ins import Handler, serving

DOCUMENTS: dict[Side, str] = {
    "cloud": "When does the harbour library open? The harbour library of Tarnwick opens at eight in the morning.\n",
    "device": "My landlord is called Velda, and the harbour library has kept a book for me.\n",
}
PAGE = (
    b"<title>Tarnwick</title><p>The harbour library of Tarnwick opens at eight in the morning, and my landlord knows."
)


@dataclass
class StandIn:
    """A SearXNG that finds its own page, whatever is asked."""

    url: str = ""
    queries: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def web() -> Iterator[StandIn]:
    web = StandIn()

    class Web(Handler):
        def get(self) -> None:
            url = urlsplit(self.path)
            if url.path == "/search":
                web.queries += parse_qs(url.query)["q"]
                found = [{"url": f"{web.url}/page", "title": "Tarnwick", "content": "The harbour library."}]
                self.answer(json.dumps({"results": found}).encode(), "application/json")
            else:
                self.answer(PAGE, "text/html")

    with serving(Web) as web.url:
        yield web


@contextmanager
def researching_pair(directory: Path, web: StandIn, model: str) -> Iterator[Pair]:
    """A pair that may fetch from loopback."""
    usual = demo.command
    launcher = [sys.executable, str(Path(loopback_web.__file__))]

    def command(*given: str) -> list[str]:
        return [*launcher, *given] if given[0] in ("serve", "agent") else usual(*given)

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo, "command", command)
            flags = ("--web-search", web.url)
            pair = stack.enter_context(running_pair(directory, model=model, documents=DOCUMENTS, flags=flags))
        yield pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, web: StandIn) -> Iterator[Pair]:
    with researching_pair(tmp_path_factory.mktemp("pair"), web, "demo") as pair:
        yield pair


def ask(client: OpenAI, workflow: str | None = None, *, model: str = "", **extension: object) -> Any:
    asked = {"report": True} | ({} if workflow is None else {"workflow": workflow}) | extension
    return client.chat.completions.create(
        model=model or client.models.list().data[0].id,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=64,
        temperature=0.0,
        extra_body={"paceline": asked},
    )


def report(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["paceline"]
    return found


@pytest.mark.parametrize(("side", "workflow"), [("device", "fast"), ("cloud", "advanced")])
def test_both_sides_write_the_answer_after_a_workflow(pair: Pair, side: Side, workflow: str) -> None:
    answer = ask(pair.client(side), workflow, steps=True)
    assert "Velda" in answer.choices[0].message.content
    reported = report(answer)
    assert reported["strategy"] == "aggregate" and reported["degraded"] is None
    assert f"workflow {workflow}" in reported["why"]
    stages = [step["stage"] for step in reported["steps"]]
    assert stages.count("search") == reported["stats"]["lookups"]
    assert ("rewrite" in stages) == (workflow == "advanced")
    assert "device" in {cited["side"] for cited in reported["citations"]}
    assert answer.choices[0].message.model_extra["reasoning_content"].count("\n") == len(stages)


def test_a_workflow_of_the_cloud_tells_nothing_of_private_documents(pair: Pair) -> None:
    answer = ask(pair.client("cloud"), "advanced", steps=True)
    told = answer.choices[0].message.model_extra["reasoning_content"]
    assert "landlord is called" not in told and "device.md" not in told
    assert {cited["passage"] for cited in report(answer)["citations"] if cited["side"] == "device"} == {""}


def sides(answer: Any) -> set[str]:
    return {cited["side"] for cited in report(answer)["citations"]}


@pytest.mark.parametrize("side", ["device", "cloud"])
def test_both_sides_and_the_web_are_behind_one_answer(pair: Pair, web: StandIn, side: Side) -> None:
    web.queries.clear()
    answer = ask(pair.client(side), model=f"{pair.client(side).models.list().data[0].id}:research", steps=True)
    told = report(answer)
    assert "Velda" in answer.choices[0].message.content
    assert (told["strategy"], told["degraded"]) == ("aggregate", None)
    assert sides(answer) == {"device", "cloud", "web"}
    assert f"{web.url}/page" in {cited.get("url") for cited in told["citations"]}
    assert web.queries and told["stats"]["sent_web_query_bytes"] >= len(web.queries[0])
    assert not any("velda" in query.lower() for query in web.queries)
    stages = {step["stage"] for step in told["steps"]}
    assert stages >= {"plan", "search web", "fetch", "embed page"}


def test_local_only_asks_no_web(pair: Pair, web: StandIn) -> None:
    web.queries.clear()
    answer = ask(pair.client("device"), "research", privacy="local-only")
    assert not web.queries and sides(answer) <= {"device"}
    assert report(answer)["degraded"] == "workflow_incomplete"
