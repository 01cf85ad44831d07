"""`draft_verify` between two real processes: documents, log probabilities, verifiers. Texts: `test_same_text`."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError

from paceline.strategies.base import Side
from tests.e2e.pair import QUESTION, Pair


def ask(
    pair: Pair,
    side: Side,
    strategy: str,
    *,
    documents: int = 0,
    logprobs: bool = False,
    **extra: object,
) -> Any:
    return pair.client(side).chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=48,
        temperature=1.0,
        seed=11,
        logprobs=logprobs,
        extra_body={
            "top_k": extra.pop("top_k", None),
            "paceline": {"strategy": strategy, "documents": documents, "report": True} | extra,
        },
    )


def report(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["paceline"]
    return found


def test_public_documents_of_the_cloud_are_read_and_private_ones_of_the_device_never(pair: Pair) -> None:
    expected = ask(pair, "cloud", "autoregressive", documents=1).choices[0].message.content
    answer = ask(pair, "cloud", "draft_verify", documents=1)
    assert answer.choices[0].message.content == expected
    assert not [each for each in report(answer)["citations"] if each["side"] == "device"], "the device has read nothing"
    refused = report(ask(pair, "device", "draft_verify", documents=1))
    assert refused["strategy"] == "lookup_tree" and "does not take what was retrieved" in refused["why"]


def test_a_cloud_does_not_let_its_device_draw_the_answer(pair: Pair) -> None:
    with pytest.raises(BadRequestError, match="the device draws tokens"):
        ask(pair, "cloud", "draft_verify", debug={"verifier": "rejection"})
