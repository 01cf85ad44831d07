"""Documents searched for again in mid-answer, over the API of a real pair."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from paceline.commands.demo import configured
from paceline.strategies.base import SIDES
from tests.e2e.pair import QUESTION, running_pair
from tests.e2e.test_relevance_scales import asked


def test_the_text_is_the_same_whichever_side_is_asked_and_the_report_counts_the_searches(tmp_path: Path) -> None:
    with running_pair(tmp_path, model="demo-causal") as pair:
        told = {side: asked(pair, side, model="demo-causal", strategy="aggregate", search_every=8) for side in SIDES}
        body = {
            "model": "demo-causal",
            "messages": [{"role": "user", "content": QUESTION}],
            "paceline": {"search_every": 4},
        }
        refused = httpx.post(f"{pair.url('device')}/v1/chat/completions", json=body)
    assert told["cloud"][0] == told["device"][0] != ""
    for _, report in told.values():
        assert report["degraded"] is None and report["stats"]["searches"] >= 2
        assert {cited["side"] for cited in report["citations"]} <= set(SIDES)
    assert refused.status_code == 400 and "search_every" in refused.json()["error"]["message"]


def test_a_refusal_cites_no_document_in_whatever_stretch_it_becomes_one(tmp_path: Path) -> None:
    with running_pair(tmp_path, model="demo", embedder="minilm") as pair:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Which colour has the harbour master's bicycle?"}],
            "temperature": 0,
            "paceline": {"strategy": "aggregate", "search_every": 8, "report": True},
        }
        answer = (
            httpx.post(f"{pair.url('device')}/v1/chat/completions", json=body, timeout=60.0).raise_for_status().json()
        )
    assert answer["choices"][0]["message"]["content"].startswith("I find no answer")
    assert answer["paceline"]["stats"]["searches"] > 1 and answer["paceline"]["citations"] == []


def test_an_agent_killed_in_mid_answer_leaves_one_answer_that_goes_on_over_its_searches(tmp_path: Path) -> None:
    with running_pair(
        tmp_path, model="fake:1:0.6", flags=configured(tmp_path, "tuning.emulate = 'forward=20ms'")
    ) as pair:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 48,
            "seed": 4,
            "stream": True,
            "paceline": {"strategy": "aggregate", "search_every": 8, "report": True},
        }
        text, report = "", None
        with httpx.stream("POST", f"{pair.url('cloud')}/v1/chat/completions", json=body, timeout=60.0) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                report = event.get("paceline") or report
                for choice in event["choices"]:
                    before, text = text, text + (choice["delta"].get("content") or "")
                    if text and not before:
                        pair.kill_agent()
    assert report is not None and report["degraded"] == "device_lost"
    assert report["stats"]["searches"] >= 2 and len(text) > 8
