"""R10: how an answer is computed changes nothing in it: modes x samplings x {plain, schema, logprobs, stops, choices}.

A real pair with the fake model, whose text depends on every token before. Each text has one way that is the reference,
token by token where there is one, and all others to it: every strategy, drafts of each shape, the side that is asked,
streamed or whole, or in the background by a client that comes and goes. With one seed a sampled answer is one text, so
sampled answers are compared word for word, too. That their distribution is the target's is tested on 100,000 draws in
tests/strategies/test_distributions.py, and by each verifier's own tests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import httpx
import pytest

from lab.baselines.dragon import Shape, shaped
from paceline.core.side import SIDES, Side
from tests.depth import DEPTH
from tests.e2e.pair import QUESTION, Pair
from tests.reliability.conftest import Figure, Size
from tests.reliability.honest import SCHEMA, STRICT, client_of

pytestmark = pytest.mark.anyio

Way = Mapping[str, object]  # fields of `paceline` in a request
SAMPLINGS: Final[Mapping[str, Mapping[str, object]]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 1.0, "logit_bias": {"101": 2.0}},
}
FEATURES: Final[Mapping[str, Mapping[str, object]]] = {
    "plain": {"max_tokens": 32},
    "schema": {"max_tokens": 64, "response_format": STRICT},
    "logprobs": {"max_tokens": 32, "logprobs": True, "top_logprobs": 3},
    "stops": {"max_tokens": 48, "stop": ["e ", "th", "."]},
    "choices": {"max_tokens": 24, "n": 3},
}
SHORT: Final = (*((sampling, "plain") for sampling in SAMPLINGS), *(("T=1", feature) for feature in [*FEATURES][1:]))
SOLO: Final = ("autoregressive", "lookup_tree", "pipeline", "auto")
SHAPES: Final[tuple[Shape, ...]] = ("tree", "chain", "sequence")
AT_ONCE: Final = 8


def ways() -> Mapping[str, Sequence[tuple[Side, Way]]]:
    """By whose text it is: the side that is asked and how, the reference first."""
    alone = {"privacy": "local-only"}
    found: dict[str, list[tuple[Side, Way]]] = {
        "the device's": [("device", alone | {"strategy": name}) for name in SOLO],
        "the cloud's": [
            *(("cloud", alone | {"strategy": name, "documents": 0}) for name in SOLO),
            *((side, {"strategy": "draft_verify", "documents": 0}) for side in SIDES),
        ],
        "the cloud's with its document": [
            ("cloud", alone | {"strategy": "autoregressive", "documents": 1}),
            ("cloud", {"strategy": "draft_verify", "documents": 1}),
        ],
        "both": [
            ("device", {"strategy": "aggregate"}),
            ("device", {"strategy": "auto"}),
            ("device", {"strategy": "aggregate", "privacy": "open"}),
            ("cloud", {"strategy": "aggregate"}),
        ],
    }
    for aggregator in ("mixture", "coin"):
        way = {"strategy": "aggregate", "privacy": "document-private"}
        drafts = [way | shaped(shape, aggregator=aggregator) for shape in ("none", *SHAPES)]
        found[aggregator] = [(side, each) for side in SIDES for each in drafts]
    return found


def can(whose: str, side: Side, feature: str) -> bool:
    """Under `coin` no side has the distribution that a token was drawn from, so it gives no logprobs; nor does a cloud
    give any of a joint answer, since distributions of the device are private."""
    return feature != "logprobs" or (whose != "coin" and (side == "device" or whose not in ("both", "mixture")))


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    assert answer.status_code == 200, await answer.aread()
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def said(http: httpx.AsyncClient, asked: Mapping[str, object], *, stream: bool) -> list[object]:
    """Parts of an answer that must not depend on how it was computed: of each choice the text, its end and its
    logprobs, and the number of tokens."""
    choices: list[dict[str, Any]] = [
        {"text": "", "end": None, "logprobs": []} for _ in range(int(str(asked.get("n", 1))))
    ]
    async with http.stream(
        "POST",
        "/v1/chat/completions",
        json={**asked, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})},
    ) as answer:
        parts = [event async for event in events(answer)] if stream else [json.loads(await answer.aread())]
    assert answer.status_code == 200, (asked, parts)
    degraded = [part["paceline"].get("degraded") for part in parts if part.get("paceline")]
    assert degraded and not any(degraded), parts[-1]
    ran = {part["paceline"].get("strategy") for part in parts if part.get("paceline")} - {None}
    assert asked["paceline"]["strategy"] in ("auto", *ran), "no other way took its place"  # type: ignore[index]
    for told in itertools.chain.from_iterable(part["choices"] for part in parts):
        choice = choices[told["index"]]
        choice["text"] += told["delta" if stream else "message"].get("content") or ""
        choice["end"] = told["finish_reason"] or choice["end"]
        choice["logprobs"] += [
            (entry["token"], round(entry["logprob"], 3), sorted(top["token"] for top in entry["top_logprobs"]))
            for entry in (told.get("logprobs") or {}).get("content") or ()
        ]
    (tokens,) = (part["usage"]["completion_tokens"] for part in parts if part.get("usage"))
    return [*choices, tokens]


async def resumed(http: httpx.AsyncClient, body: Mapping[str, object], after: int) -> str:
    """Text of a response in the background, whose client leaves after so many events and comes back."""
    text, identifier, last = "", "", -1

    async def read(answer: httpx.Response, most: int) -> bool:
        nonlocal text, identifier, last
        async for event in events(answer):
            assert event["sequence_number"] == last + 1, "no event twice, none left out"
            last = event["sequence_number"]
            identifier = identifier or event["response"]["id"]
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            if event["type"] in ("response.completed", "response.incomplete"):
                return True
            if last >= most:
                return False
        raise AssertionError("the stream has ended before the response")

    async with http.stream("POST", "/v1/responses", json={**body, "stream": True, "background": True}) as answer:
        done = await read(answer, after)
    while not done:
        after += 9
        where = {"stream": "true", "starting_after": last}
        async with http.stream("GET", f"/v1/responses/{identifier}", params=where) as answer:
            done = await read(answer, after)
    return text


async def test_an_answer_is_the_same_however_it_is_computed(
    pair: Pair, rng: random.Random, size: Size, figure: Figure
) -> None:
    """In the short run each form is written in a third of the ways, drawn for it, which stream or not by turns."""
    nightly = bool(size(0, 1)) or DEPTH > 1
    compared = schemas = 0
    gate = asyncio.Semaphore(AT_ONCE)

    async def compare(whose: str, feature: str, asked: Mapping[str, object]) -> None:
        nonlocal compared, schemas
        possible = [(side, way) for side, way in ways()[whose] if can(whose, side, feature)]
        others = possible[1:] if nightly else rng.sample(possible[1:], -(-len(possible) // 3))
        expected: list[Any] | None = None
        for number, (side, way) in enumerate([*possible[:1], *others]):
            for stream in (False, True) if nightly else (bool(number % 2),):
                async with gate:
                    found = await said(clients[side], {**asked, "paceline": {**way, "report": True}}, stream=stream)
                expected = expected or found
                assert found == expected, (whose, side, way, stream, asked)
                compared += 1
        if feature == "schema" and expected:
            assert set(json.loads(expected[0]["text"])) == set(SCHEMA["required"])  # type: ignore[call-overload]
            schemas += 1

    async def resume(side: Side, way: Way, asked: Mapping[str, object]) -> None:
        nonlocal compared
        async with gate:
            whole = (await clients[side].post("/v1/responses", json={**asked, "paceline": way})).json()
            text = "".join(part["text"] for item in whole["output"] for part in item.get("content") or ())
            assert await resumed(clients[side], {**asked, "paceline": way}, rng.randrange(12)) == text != ""
            proof = (await clients[side].post(f"/v1/responses/{whole['id']}/verify")).json()
        assert proof["differing"] == proof["not_provable"] == [] and proof["proven"] == proof["tokens"] > 0
        assert proof["asked_again"] == (proof["tokens"] if side == "cloud" and way is mixed else 0)
        compared += 1

    mixed: Way = {"strategy": "aggregate", **shaped("none", aggregator="mixture")}
    forms = list(itertools.product(SAMPLINGS, FEATURES)) if nightly else SHORT
    async with client_of(pair.url("cloud")) as cloud, client_of(pair.url("device")) as device:
        clients: Mapping[Side, httpx.AsyncClient] = {"cloud": cloud, "device": device}
        async with asyncio.TaskGroup() as tasks:
            for number, (sampling, feature) in itertools.product(range(size(1, 20)), forms):
                messages = [{"role": "user", "content": f"{QUESTION} {sampling} {number}"}]
                asked = {"model": "fake", "seed": number + 1, "messages": messages}
                for whose in ways():
                    form = {**asked, **SAMPLINGS[sampling], **FEATURES[feature]}
                    tasks.create_task(compare(whose, feature, form))
            # /v1/responses has no seed, and with `coin` it decides whose token it is, greedy or not.
            for number, side in itertools.product(range(size(1, 20)), SIDES):
                greedy = {"model": "fake", "input": f"{QUESTION} {number}", "max_output_tokens": 32, "temperature": 0}
                for way in ({"privacy": "local-only"}, mixed):
                    tasks.create_task(resume(side, way, greedy))
    assert schemas >= 5
    figure("answers compared", compared)
    figure("mismatches", 0, at_most=0)
    figure("answers under a schema, all valid", schemas)
