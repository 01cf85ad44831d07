"""One text whichever way it is written, from two real processes: it depends on no strategy's drafts, on no side that is
asked, and on no stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from paceline.strategies.base import Side
from tests.depth import DEPTH
from tests.e2e.pair import QUESTION, Pair

SCHEMA: Final = {
    "type": "object",
    "properties": {"day": {"enum": ["monday", "friday"]}, "hour": {"type": "integer", "minimum": 1, "maximum": 12}},
    "required": ["day", "hour"],
    "additionalProperties": False,
}
FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {"temperature": 1.0},
    "penalties": {
        "temperature": 0.9,
        "top_p": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": {"101": 2.0},
    },
    "greedy": {"temperature": 0.0},
    "stop strings": {"temperature": 1.0, "stop": ["he ", "an"]},
    "logprobs": {"temperature": 1.0, "logprobs": True, "top_logprobs": 3},
    "schema": {
        "temperature": 1.0,
        "max_tokens": 96,
        "response_format": {"type": "json_schema", "json_schema": {"name": "when", "strict": True, "schema": SCHEMA}},
    },
    "n = 3": {"temperature": 1.0, "n": 3},
}
# By whose text it is: every way to it, as the side that is asked and the object `paceline`.
SOLO: Final = ("autoregressive", "lookup_tree", "pipeline", "auto")
CHAIN: Final = {"drafting": [1, 1]}
WAYS: Final[Mapping[str, tuple[tuple[Side, Mapping[str, Any]], ...]]] = {
    "the device's": tuple(("device", {"privacy": "local-only", "strategy": name}) for name in SOLO),
    "the cloud's": (
        *(("cloud", {"privacy": "local-only", "strategy": name, "documents": 0}) for name in SOLO),  # type: ignore[misc]
        ("device", {"strategy": "draft_verify", "documents": 0}),
        ("cloud", {"strategy": "draft_verify", "documents": 0}),
    ),
    "both": (
        ("device", {"strategy": "aggregate"}),
        ("device", {"strategy": "auto"}),
        ("device", {"strategy": "aggregate", "privacy": "open"}),
        ("device", {"strategy": "aggregate", "debug": CHAIN}),
        ("device", {"strategy": "aggregate", "debug": {"drafting": [4, 16, 0]}}),
        ("cloud", {"strategy": "aggregate"}),
    ),
}
SEEDS: Final = (11, 12)


def answer(pair: Pair, side: Side, asked: Mapping[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """What each choice says, how it ends, and its logprobs as they are printed."""
    client = pair.client(side)
    if not stream:
        whole = client.chat.completions.create(**asked)
        return [
            {
                "text": choice.message.content or "",
                "end": choice.finish_reason,
                "logprobs": [] if choice.logprobs is None else [str(each) for each in choice.logprobs.content or ()],
            }
            for choice in sorted(whole.choices, key=lambda choice: choice.index)
        ]
    said: list[dict[str, Any]] = [{"text": "", "end": None, "logprobs": []} for _ in range(asked.get("n", 1))]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices:
            choice = said[part.index]
            choice["text"] += part.delta.content or ""
            choice["end"] = part.finish_reason or choice["end"]
            if part.logprobs is not None:
                choice["logprobs"] += [str(each) for each in part.logprobs.content or ()]
    return said


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whose", WAYS)
def test_every_way_writes_the_text_that_is_owed(pair: Pair, whose: str, form: str) -> None:
    """Streamed and whole in turn; with a depth above 1 both of every way, which makes 444 answers."""
    for seed in SEEDS[:DEPTH]:
        expected: list[dict[str, Any]] | None = None
        for number, (side, how) in enumerate(WAYS[whose]):
            if form == "logprobs" and side == "cloud" and whose == "both":
                continue  # refused: the distributions stay on the device
            asked = {
                "model": "fake",
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": 40,
                "seed": seed,
                **FORMS[form],
                "extra_body": {"paceline": how},
            }
            for stream in (False, True) if DEPTH > 1 else (bool(number % 2),):
                said = answer(pair, side, asked, stream=stream)
                expected = said if expected is None else expected
                assert said == expected, (side, how, stream)
