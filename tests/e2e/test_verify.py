"""Stored answers of two real processes, proven over HTTP and by the command."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Final

import httpx

from paceline.commands.demo import command
from paceline.strategies.base import SIDES, Side
from tests.depth import DEPTH
from tests.e2e.pair import QUESTION, Pair

FORMS: Final[tuple[Mapping[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {"101": 2.0}},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "stop": ["he ", "an"]},
)


SOLO: Final = ("autoregressive", "lookup_tree", "pipeline")


WAYS: Final[tuple[tuple[Side, Mapping[str, Any]], ...]] = (
    *((side, {"strategy": name, "privacy": "local-only"}) for side in SIDES for name in SOLO),
    ("device", {"strategy": "draft_verify", "documents": 0}),
    ("cloud", {"strategy": "draft_verify"}),
    *((side, {"strategy": "aggregate"}) for side in SIDES),
    ("cloud", {"workflow": "advanced", "privacy": "local-only"}),
)


CASES: Final = tuple(product(WAYS, FORMS))


def test_stored_answers_of_every_strategy_are_proven(pair: Pair) -> None:
    """With a depth of 10 all cases ten times: 550 answers."""
    for number in range(len(CASES) * DEPTH) if DEPTH > 1 else range(0, len(CASES), 3):
        (side, how), form = CASES[number % len(CASES)]
        body = {"model": "fake", "input": QUESTION, "max_output_tokens": 40, "seed": number, "paceline": how, **form}
        answer = httpx.post(f"{pair.url(side)}/v1/responses", json=body, timeout=60.0).json()
        found = httpx.post(f"{pair.url(side)}/v1/responses/{answer['id']}/verify", timeout=60.0).json()
        assert (found["differing"], found["not_provable"]) == ([], []), (side, how, form, found)
        assert found["proven"] == found["tokens"] >= answer["usage"]["output_tokens"]
        asked = side == "cloud" and how.get("strategy") == "aggregate"  # the device's documents stay there
        assert found["asked_again"] == (found["tokens"] if asked else 0)
    shown = pair.children.run(command("verify", answer["id"], "--url", pair.url(side)))
    assert f"{found['tokens']} of {found['tokens']} tokens proven" in shown
