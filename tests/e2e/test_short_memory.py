"""A server and an agent with KV memory for two joint answers, and eight clients at once, of which two leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.fake import EOS
from paceline.strategies.base import SIDES, Side
from tests.e2e.pair import QUESTION, Pair, running_pair

CLIENTS = 8
LEAVING = {2, 5}  # clients, one at each side
MAX_TOKENS = 120  # more than the growth for which an admitted answer finds room
KV = ("--kv-mib", "2")  # 512 rows of the fake model
LOOKS = 2000  # at the metrics, until memory is free again


def ask(pair: Pair, number: int, *, leave: bool = False) -> str:
    """The text of a client's answer. leave: end the stream after its first tokens."""
    text, reason = "", None
    with pair.client(SIDES[number % 2]) as client:
        stream = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            top_p=0.95 if number % 3 else 1.0,
            seed=number,
            logit_bias={str(EOS): -100},  # all are long, so that answers outgrow their memory and are preempted
            stream=True,
            extra_body={"paceline": {"report": True}},
        )
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
            report = (chunk.model_extra or {}).get("paceline") or {}
            assert report.get("degraded") is None, (number, report)
            assert report.get("strategy", "aggregate") == "aggregate", (number, report)
            if leave and text:
                return text
    assert reason == "length", number
    return text


def metrics(pair: Pair, side: Side) -> dict[str, float]:
    body = httpx.get(f"{pair.url(side)}/metrics", trust_env=False).text
    return {sample.name: sample.value for family in text_string_to_metric_families(body) for sample in family.samples}


def test_answers_in_short_memory_all_complete_and_leave_nothing_behind(tmp_path: Path) -> None:
    with running_pair(tmp_path, flags=KV) as pair:
        with_room = [ask(pair, number) for number in range(CLIENTS)]  # one at a time each has all of the memory
        with ThreadPoolExecutor(CLIENTS) as clients:
            found = list(
                clients.map(lambda number: ask(pair, number, leave=number in LEAVING), range(CLIENTS), timeout=120)
            )
        for number, (text, expected) in enumerate(zip(found, with_room, strict=True)):
            assert text and expected.startswith(text) and (number in LEAVING or text == expected), number
        for side in SIDES:
            seen = {}
            for _ in range(LOOKS):  # what a client that leaves gives back comes back soon after
                seen = metrics(pair, side)
                if seen["paceline_answers"] == 0 and seen["paceline_kv_free_rows"] == seen["paceline_kv_rows"]:
                    break
            assert (seen["paceline_answers"], seen["paceline_kv_free_rows"]) == (0, seen["paceline_kv_rows"]), side
        pair.children.check()
