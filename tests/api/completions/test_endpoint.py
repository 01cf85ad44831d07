"""`/v1/completions` with the official client on a real node."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Output
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError
from paceline.runtime import admission
from tests.api.generation.test_request import fault
from tests.api.real import MAX_POSITIONS, serving_node
from tests.api.scripted import WAIT, client_of, connected

PROMPT = "Once upon a time, in Käsmu 🚲"
ROUTE = "/v1/completions"


def asked(**more: object) -> dict[str, Any]:
    return {"model": "fake", "prompt": PROMPT, "temperature": 0.0, **more}


def test_a_whole_completion_is_sixteen_tokens_unless_asked_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(**asked())
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.index, choice.finish_reason) == ("text_completion", "fake", 0, "length")
    assert answer.id.startswith("cmpl-") and choice.logprobs is None
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == len(PROMPT.encode()) == answer.usage.total_tokens - 16
    assert len(choice.text.encode()) == 16


def counted(answer: Any) -> tuple[int, int, int]:
    """Usage without the draft tokens, which depend on earlier requests."""
    return answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 4, "n": 3}, {"echo": True}, {"stop": ["e", "x"]}])
def test_streamed_and_whole_are_the_same(client: openai.OpenAI, more: dict[str, Any]) -> None:
    fields = asked(max_tokens=60, prompt=[PROMPT, "Twice"], logprobs=2, **more)
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and counted(chunks[-1]) == counted(whole)
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        streamed = [part.logprobs for part in parts if part.logprobs is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for one in streamed for item in getattr(one, name)] == getattr(choice.logprobs, name)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_sixteen_prompts_at_once_are_answered_as_each_alone(client: openai.OpenAI) -> None:
    prompts = [f"{PROMPT} number {number}" for number in range(16)]
    fields = asked(prompt=prompts, n=2, temperature=1.0, seed=9)
    together = client.completions.create(**fields)
    assert [choice.index for choice in together.choices] == list(range(32))
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in prompts)
    for index in (0, 7, 15):
        alone = client.completions.create(**(fields | {"prompt": prompts[index]}))
        texts = [choice.text for choice in together.choices[2 * index : 2 * index + 2]]
        assert [choice.text for choice in alone.choices] == texts
        assert texts[0] != texts[1]


def test_without_a_seed_equal_prompts_are_answered_differently(client: openai.OpenAI) -> None:
    answer = client.completions.create(**asked(prompt=[PROMPT] * 4, temperature=1.5, max_tokens=40))
    assert len({choice.text for choice in answer.choices}) > 1


def test_token_ids_are_continued_like_their_text(client: openai.OpenAI) -> None:
    ids = list(PROMPT.encode())
    for prompt in (ids, [ids, list(b"Twice")], [PROMPT, "Twice"]):
        first = client.completions.create(**asked(prompt=prompt, echo=True)).choices[0]
        assert first.text.startswith(PROMPT)
        assert first.text == client.completions.create(**asked(echo=True)).choices[0].text


def prompt_dists(prompt: bytes) -> list[Any]:
    engine = FakeEngine(3, spread=0.3)
    segment = Segment(SeqId(1), 0, tuple(prompt), logits="all")
    return list(engine.forward(Batch((segment,))).dists[0])


@pytest.mark.parametrize(("max_tokens", "as_ids"), [(0, True), (1, False)])
def test_a_prompt_is_scored_as_evaluations_need_it(client: openai.OpenAI, max_tokens: int, as_ids: bool) -> None:
    """lm-evaluation-harness reads `token_logprobs[ctxlen:-1]` of an answer of one token, and its alternatives."""
    text = "The bicycle shed. " * 12
    data = text.encode()
    prompt: Any = list(data) if as_ids else text
    fields = asked(prompt=prompt, max_tokens=max_tokens, logprobs=1, echo=True, seed=1234, logit_bias={"256": -100})
    answer = client.completions.create(**fields)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.tokens is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(data) + max_tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    for at, dist in enumerate(prompt_dists(data)[: len(data) - 1], 1):
        probability = dist.prob(data[at])
        expected = -9999.0 if probability == 0.0 else pytest.approx(math.log(probability))
        assert logprobs.token_logprobs[at] == expected
        best, best_prob = dist.top(1)[0]
        assert max(logprobs.top_logprobs[at].values()) == pytest.approx(math.log(best_prob))
        assert (logprobs.token_logprobs[at] == max(logprobs.top_logprobs[at].values())) == (best == data[at])
    assert choice.text[: len(text)] == text and "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == list(range(len(logprobs.tokens)))
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens


@pytest.mark.parametrize("strategy", ["autoregressive", "lookup_tree"])
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 0.2},
        {"temperature": 1.3, "top_p": 0.1},
        {"temperature": 0.9, "logit_bias": {"113": 100}},
        {"temperature": 0.7, "presence_penalty": 2.0, "extra_body": {"repetition_penalty": 1.5, "top_k": 2}},
        {"extra_body": {"regex": "[0-9]{12}"}},
    ],
)
def test_an_answers_logprobs_are_those_of_the_same_text_as_a_prompt(
    client: openai.OpenAI, strategy: str, changes: dict[str, Any]
) -> None:
    """Whatever it was sampled with."""
    body = {"paceline": {"strategy": strategy}, **changes.get("extra_body", {})}
    fields = asked(logprobs=20, max_tokens=12, seed=3) | changes | {"extra_body": body}
    written = client.completions.create(**fields).choices[0].logprobs
    assert written is not None and written.tokens is not None and written.token_logprobs and written.top_logprobs
    ids = [*PROMPT.encode(), *(token_id(token) for token in written.tokens)]
    scored = client.completions.create(**asked(prompt=ids, logprobs=20, max_tokens=0, echo=True)).choices[0].logprobs
    assert scored is not None and scored.token_logprobs and scored.top_logprobs
    number = len(written.tokens)
    assert written.token_logprobs == pytest.approx(scored.token_logprobs[-number:])
    for ours, theirs in zip(written.top_logprobs, scored.top_logprobs[-number:], strict=True):
        assert len(ours) >= 20 and ours == pytest.approx(theirs)


def token_id(name: str) -> int:
    return int(name.removeprefix("bytes:\\x"), 16) if name.startswith("bytes:") else ord(name)


@pytest.mark.parametrize("strategy", ["autoregressive", "lookup_tree"])
def test_an_answer_that_ends_at_once_still_has_an_entry_for_its_end(client: openai.OpenAI, strategy: str) -> None:
    """lm-evaluation-harness drops the last entry, which would otherwise be one of the prompt."""
    fields = asked(max_tokens=1, logprobs=1, echo=True, logit_bias={"256": 100.0}, prompt="It is done. ")
    choice = client.completions.create(**fields, extra_body={"paceline": {"strategy": strategy}}).choices[0]
    assert choice.finish_reason == "stop" and choice.text == "It is done. "
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[-1] == "<|end|>" and len(choice.logprobs.tokens) == 13
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[-1] == 12


class CountingEngine(FakeEngine):
    """Counts its forward passes, and refuses to score."""

    def __init__(self) -> None:
        super().__init__(3, spread=0.3, max_positions=MAX_POSITIONS)
        self.forwards = 0

    def forward(self, batch: Batch) -> Output:
        self.forwards += 1
        if any(segment.logits == "all" for segment in batch.segments):
            raise EngineError("Nothing is scored here.")
        return super().forward(batch)


def test_a_prompt_that_is_refused_or_not_admitted_is_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 2)
    fields = asked(prompt=[PROMPT] * 3, echo=True, logprobs=1)
    with serving_node(tmp_path, engine := CountingEngine()) as (url, _), client_of(url) as http:
        for more in (
            {"paceline": {"strategy": "aggregate"}},
            {"paceline": {"privacy": "answer-private"}},
            {"paceline": {"debug": {"aggregator": "coin"}}, "max_tokens": 0},
            {"prompt": [PROMPT, [300]]},
        ):
            fault(http.post(ROUTE, json=fields | more), 400)
        fault(http.post(ROUTE, json=fields), 429)
        assert http.get("/readyz").json()["answers"] == 0
    assert engine.forwards == 0


def test_a_prompt_that_cannot_be_scored_leaves_no_answer_behind(tmp_path: Path) -> None:
    with serving_node(tmp_path, engine := CountingEngine()) as (url, _), client_of(url) as http:
        fault(http.post(ROUTE, json=asked(prompt=[PROMPT] * 3, echo=True, logprobs=1)), 500)
        assert http.get("/readyz").json()["answers"] == 0
    assert engine.forwards


def test_the_alternatives_are_as_many_as_asked_for_and_hold_the_chosen(client: openai.OpenAI) -> None:
    fields = asked(temperature=1.3, seed=3, max_tokens=30)
    for top in range(1, 6):
        logprobs = client.completions.create(**fields, logprobs=top).choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
        assert logprobs.token_logprobs is not None
        for token, logprob, others in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert others[token] == logprob and len(others) <= top + 1
    none = client.completions.create(**fields, logprobs=0).choices[0].logprobs
    assert none is not None and none.top_logprobs is None and none.token_logprobs


def test_an_empty_prompt_is_the_beginning_of_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="", max_tokens=4, temperature=0, logit_bias={"256": -100})
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 4)


def test_the_report_comes_where_it_is_requested(client: openai.OpenAI) -> None:
    report = {"paceline": {"report": True}}
    whole = client.completions.create(**asked(), extra_body=report)
    assert (whole.model_extra or {})["paceline"]["why"].startswith("raw tokens")
    assert (whole.model_extra or {})["paceline"]["degraded"] is None


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": ["a", 3]}, "prompt[1]", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt[1]", "token id"),
    ({"prompt": [[1], [True]]}, "prompt[1][0]", "token id"),
    ({"prompt": [-1]}, "prompt[0]", "must be"),
    ({"prompt": [300]}, "prompt", "from 0 to 256"),
    ({"prompt": {"text": "a"}}, "prompt", "a string, a list"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "more than 128"),
    ({"suffix": "end"}, "suffix", "suffix"),
    ({"best_of": 2}, "best_of", "equal to n"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"paceline": {"strategy": "aggregate"}}, "paceline.strategy", "raw tokens"),
    ({"paceline": {"workflow": "fast"}}, "paceline.workflow", "without documents"),
    ({"paceline": {"documents": 1}}, "paceline.documents", "without documents"),
    ({"paceline": {"vector_stores": ["vs_1"]}}, "paceline.vector_stores", "without documents"),
]


def test_unsupported_requests_are_refused_by_name(http: httpx.Client) -> None:
    for more, param, words in REFUSED:
        refused = fault(http.post(ROUTE, json={"model": "fake", "prompt": "a"} | more), 400)
        assert refused["param"] == param and words in str(refused["message"]), more


def test_a_prompt_beyond_the_context_is_refused_in_the_words_agents_know(http: httpx.Client) -> None:
    scored: dict[str, object] = {"echo": True, "logprobs": 1}
    for more in ({}, {"echo": True}, scored, {"stream": True}):
        body = {"model": "fake", "prompt": ["short", "x" * MAX_POSITIONS]} | more
        refused = fault(http.post(ROUTE, json=body), 400)
        assert refused["code"] == "context_length_exceeded" and refused["param"] == "prompt"
        assert f"maximum context length is {MAX_POSITIONS} tokens" in str(refused["message"])
    whole = {"model": "fake", "prompt": "x" * MAX_POSITIONS, "max_tokens": 0} | scored
    assert http.post(ROUTE, json=whole).status_code == 200


class BlockedEngine(FakeEngine):
    """Sets `called` in `forward`, and blocks until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(3, spread=0.3, max_positions=MAX_POSITIONS)
        self.called = threading.Event()
        self.go_on = threading.Event()

    def forward(self, batch: Batch) -> Output:
        self.called.set()
        assert self.go_on.wait(WAIT)
        return super().forward(batch)


def test_a_client_that_leaves_frees_the_rows_of_the_prompt_that_is_scored(tmp_path: Path) -> None:
    """`serving_node` asserts that the engine holds no rows."""
    engine, more = BlockedEngine(), {"echo": True, "logprobs": 1}
    with serving_node(tmp_path, engine) as (url, _):
        body = json.dumps(asked(prompt=[PROMPT * 3, "Twice"], **more)).encode()
        with connected(url) as connection:
            head = f"POST {ROUTE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert engine.called.wait(WAIT)
        engine.go_on.set()
        with client_of(url) as client:
            assert client.post(ROUTE, json=asked(**more)).status_code == 200
