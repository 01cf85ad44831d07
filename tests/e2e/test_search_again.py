"""Documents searched for again in mid-answer, over the API of a real pair."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from paceline.strategies.base import SIDES
from tests.e2e.pair import QUESTION, Pair, running_pair
from tests.e2e.test_relevance_scales import asked


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(tmp_path_factory.mktemp("pair"), model="demo", embedder="minilm") as pair:
        yield pair


def test_the_text_is_the_same_whichever_side_is_asked_and_the_report_counts_the_searches(pair: Pair) -> None:
    told = {side: asked(pair, side, strategy="aggregate", search_every=8) for side in SIDES}
    assert told["cloud"][0] == told["device"][0] != ""
    for _, report in told.values():
        assert report["degraded"] is None and report["stats"]["searches"] >= 2
        assert {cited["side"] for cited in report["citations"]} <= set(SIDES)
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "paceline": {"search_every": 4}}
    refused = httpx.post(f"{pair.url('device')}/v1/chat/completions", json=body)
    assert refused.status_code == 400 and "search_every" in refused.json()["error"]["message"]


def test_a_refusal_cites_no_document_in_whatever_stretch_it_becomes_one(pair: Pair) -> None:
    question = "Which colour has the harbour master's bicycle?"
    text, report = asked(pair, "device", question, strategy="aggregate", search_every=8)
    assert text.startswith("I find no answer")
    assert report["stats"]["searches"] > 1 and report["citations"] == []
