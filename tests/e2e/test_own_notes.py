"""Notes that no training text holds, read by the demonstration: two real processes, asked over HTTP on either side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from paceline.commands.demo import Children, Pair, start_pair
from paceline.engine.reader.answer import NOTHING
from paceline.engine.reader.question import ABILITIES
from paceline.strategies.base import Side

PRIVATE = (
    "Cottage notes. The spare key hangs behind the bird feeder. Wifi for guests: blue-kettle-71. The chimney sweep is "
    "Mr Tollen, he comes every October. Milk is delivered on Fridays."
)
PUBLIC = (
    "Village shop of Ardley. Open from 8:15 to 17:30, closed on Wednesdays. Stamps cost 85 cents. The post van leaves "
    "at 16:00 from the old mill. The shop is run by Greta Holm and her daughter."
)


BOTH = "Who is the chimney sweep, and who runs the shop of Ardley?"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    documents: dict[Side, Path] = {"device": directory / "cottage.md", "cloud": directory / "shop.md"}
    documents["device"].write_text(PRIVATE)
    documents["cloud"].write_text(PUBLIC)
    with Children(directory) as children:
        yield start_pair(children, documents, model="demo", embedder="minilm", device="laptop")


def asked(pair: Pair, side: Side, question: str, **extension: object) -> tuple[str, dict[str, Any]]:
    """Text and report of a greedy answer."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "paceline": {"report": True, **extension}}
    found = httpx.post(f"{pair.url(side)}/v1/chat/completions", json=body, timeout=60.0).raise_for_status().json()
    return found["choices"][0]["message"]["content"], found["paceline"]


@pytest.mark.parametrize("side", ["device", "cloud"])
@pytest.mark.parametrize(
    ("question", "facts", "sides"),
    [
        ("Who is the chimney sweep?", ("Tollen",), {"device"}),
        ("How much do stamps cost?", ("85 cents",), {"cloud"}),
        (BOTH, ("Tollen", "Greta Holm"), {"cloud", "device"}),
    ],
)
def test_each_side_adds_what_its_documents_say(
    pair: Pair, side: Side, question: str, facts: tuple[str, ...], sides: set[Side]
) -> None:
    text, report = asked(pair, side, question)
    assert all(fact in text for fact in facts), text
    cited = report["citations"]
    assert isinstance(cited, list) and sides <= {each["side"] for each in cited}
    assert report["degraded"] is None
    assert report["strategy"] == "aggregate" or len(sides) == 1, "else by the fastest way to the text of one side"


@pytest.mark.parametrize("side", ["device", "cloud"])
@pytest.mark.parametrize(
    "question",
    ["Who invented the steam engine?", "Suggest one emoji that stands for a talk about the key of the shop."],
)
def test_where_no_document_answers_it_says_so_and_cites_none(pair: Pair, side: Side, question: str) -> None:
    text, report = asked(pair, side, question)
    assert NOTHING in text and report["citations"] == []


def test_a_refusal_after_further_searches_cites_none(pair: Pair) -> None:
    text, report = asked(pair, "device", "Who invented the steam engine?", strategy="aggregate", search_every=8)
    assert NOTHING in text and report["stats"]["searches"] > 1 and report["citations"] == []


@pytest.mark.parametrize("side", ["device", "cloud"])
def test_a_greeting_is_answered_with_what_it_can_and_cites_none(pair: Pair, side: Side) -> None:
    text, report = asked(pair, side, "Hello!")
    assert text == f"{ABILITIES}." and report["citations"] == []


class Departure(BaseModel):
    time: str
    place: str


@pytest.mark.parametrize("side", ["device", "cloud"])
def test_an_answer_of_a_form_holds_what_was_found_and_ends(pair: Pair, side: Side) -> None:
    client = OpenAI(base_url=f"{pair.url(side)}/v1", api_key="none", max_retries=0, timeout=60.0)
    found = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": "When does the post van leave?"}], response_format=Departure
    )
    assert found.choices[0].message.parsed == Departure(time="16:00", place="the old mill")


@pytest.mark.parametrize("side", ["device", "cloud"])
def test_a_required_call_comes_once_and_whole(pair: Pair, side: Side) -> None:
    client = OpenAI(base_url=f"{pair.url(side)}/v1", api_key="none", max_retries=0, timeout=60.0)
    parameters = {"type": "object", "properties": {"place": {"enum": ["cottage", "shop"]}}, "required": ["place"]}
    (choice,) = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "When does the shop open?"}],
        tools=[{"type": "function", "function": {"name": "hours", "parameters": parameters}}],
        tool_choice="required",
    ).choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, json.loads(call.function.arguments)) == ("hours", {"place": "shop"})
