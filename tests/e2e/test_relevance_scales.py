"""A real pair whose sides score documents on different scales: both weigh the same, and reports and logs say so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from paceline.strategies.base import SIDES, Side
from tests.e2e.pair import DEVICE, QUESTION, Pair, running_pair

EQUAL = "the documents of both sides weigh the same, since their"


def asked(pair: Pair, side: Side, question: str = QUESTION, **extension: object) -> tuple[str, Mapping[str, Any]]:
    """Text and report of an answer of this side's API."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
        "paceline": {"report": True, **extension},
    }
    answer = httpx.post(f"{pair.url(side)}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["paceline"]


def ready(pair: Pair, side: Side) -> Mapping[str, Any]:
    found: Mapping[str, Any] = httpx.get(f"{pair.url(side)}/readyz").raise_for_status().json()
    return found


def test_with_other_embedders_both_sides_weigh_the_same_and_say_so(tmp_path: Path) -> None:
    with running_pair(tmp_path, model="demo", embedder={"cloud": "minilm", "device": "hash"}) as pair:
        texts: set[str] = set()
        for side in SIDES:
            text, report = asked(pair, side, strategy="aggregate")
            texts.add(text)
            assert report["why"].endswith(f"; {EQUAL} embedders differ") and report["degraded"] is None
            assert ready(pair, side)["equal_weights"] == 1
            peer = "cloud" if side == "device" else DEVICE
            log = (tmp_path / f"{side}.log").read_text()
            assert log.count(f"in answers with {peer} {EQUAL} embedders differ") == 1
        assert len(texts) == 1, "the same text whichever side is asked"
        _, fetched = asked(pair, "device", privacy="answer-private")
        assert fetched["why"].endswith(f"; {EQUAL} embedders differ")
        assert {cited["side"] for cited in fetched["citations"]} == set(SIDES)
        _, alone = asked(pair, "cloud", strategy="autoregressive")
        assert EQUAL not in alone["why"], "one side's documents weigh among themselves"
