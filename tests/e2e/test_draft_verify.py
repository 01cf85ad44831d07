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


def test_logprobs_of_the_clouds_model_reach_the_device(pair: Pair) -> None:
    def probs(answer: Any) -> list[float]:
        return [entry.logprob for entry in answer.choices[0].logprobs.content]

    expected = ask(pair, "cloud", "autoregressive", logprobs=True, top_k=1)
    assert min(probs(expected)) < -0.5, "the model's own: not of the one token to sample from"
    for verifier in ("agreement", "rejection", "truncated"):
        answer = ask(pair, "device", "draft_verify", logprobs=True, top_k=1, debug={"verifier": verifier})
        assert answer.choices[0].message.content == expected.choices[0].message.content
        assert probs(answer) == pytest.approx(probs(expected), abs=1e-9), verifier


@pytest.mark.parametrize(
    ("verifier", "side"),
    [("agreement", "device"), ("rejection", "device"), ("truncated", "device"), ("truncated", "cloud")],
)
def test_every_verifier_serves(pair: Pair, verifier: str, side: Side) -> None:
    """With one token to sample from there is one text, while drafts are accepted, rejected and recovered as always."""
    expected = ask(pair, "cloud", "autoregressive", top_k=1).choices[0].message.content
    answer = ask(pair, side, "draft_verify", top_k=1, debug={"verifier": verifier})
    assert answer.choices[0].message.content == expected
    assert report(answer)["strategy"] == "draft_verify" and not report(answer).get("degraded")
    free = ask(pair, side, "draft_verify", debug={"verifier": verifier})
    assert report(free)["strategy"] == "draft_verify" and free.usage.completion_tokens > 0


def test_a_cloud_does_not_let_its_device_draw_the_answer(pair: Pair) -> None:
    with pytest.raises(BadRequestError, match="the device draws tokens"):
        ask(pair, "cloud", "draft_verify", debug={"verifier": "rejection"})
