"""A real pair whose sides score documents on different scales: both weigh the same, and reports and logs say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.encoder import package_directory
from paceline.strategies.base import SIDES, Side
from tests.e2e.pair import QUESTION, Pair, running_pair

EQUAL = "the documents of both sides weigh the same, since their"


def reports(pair: Pair, **extension: object) -> dict[Side, tuple[str, dict[str, Any]]]:
    """Of each side's API: the text and the report of one answer."""
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 48,
        "temperature": 0,
        "paceline": {"report": True, **extension},
    }
    found: dict[Side, tuple[str, dict[str, Any]]] = {}
    for side in SIDES:
        answer = httpx.post(f"{pair.url(side)}/v1/chat/completions", json=asked, timeout=60.0)
        body = answer.raise_for_status().json()
        found[side] = body["choices"][0]["message"]["content"], body["paceline"]
    return found


def ready(pair: Pair, side: Side) -> Mapping[str, Any]:
    found: Mapping[str, Any] = httpx.get(f"{pair.url(side)}/readyz").raise_for_status().json()
    return found


def test_with_other_embedders_both_sides_weigh_the_same_and_say_so(tmp_path: Path) -> None:
    with running_pair(tmp_path, model="demo", embedder={"cloud": "minilm", "device": "hash"}) as pair:
        found = reports(pair, strategy="aggregate")
        assert found["device"][0] == found["cloud"][0], "the same text whichever side is asked"
        for side, peer in (("cloud", "laptop"), ("device", "cloud")):
            report = found[side][1]
            assert report["why"].endswith(f"; {EQUAL} embedders differ") and report["degraded"] is None
            assert ready(pair, side)["equal_weights"] == peer
            log = (tmp_path / f"{side}.log").read_text()
            assert log.count(f"in answers with {peer} {EQUAL} embedders differ") == 1
        fetched = reports(pair, privacy="answer-private")["device"][1]
        assert fetched["why"].endswith(f"; {EQUAL} embedders differ")
        assert {cited["side"] for cited in fetched["citations"]} == set(SIDES)


def test_with_other_temperatures_of_relevance_too(tmp_path: Path) -> None:
    with running_pair(tmp_path, model="demo", cloud_flags=("--relevance-temperature", "0.5")) as pair:
        for side, temperatures in (("cloud", "0.5 and 0.8"), ("device", "0.8 and 0.5")):
            why = reports(pair, strategy="aggregate")[side][1]["why"]
            assert why.endswith(f"; {EQUAL} relevance temperatures differ ({temperatures})")


@pytest.mark.parametrize("same", ["hash", "minilm"])
def test_where_scales_are_the_same_nothing_is_said(tmp_path: Path, same: str) -> None:
    """MiniLM by its own name and as a folder of sentence-transformers are one embedder."""
    embedder: str | dict[Side, str] = same
    if same == "minilm":
        embedder = {"cloud": same, "device": str(package_directory())}
    with running_pair(tmp_path, model="demo", embedder=embedder) as pair:
        for side in SIDES:
            assert EQUAL not in json.dumps(reports(pair, strategy="aggregate"))
            assert "equal_weights" not in ready(pair, side)
