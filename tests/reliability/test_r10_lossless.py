"""R10: how an answer is computed changes nothing in it: modes x samplings x {plain, schema, logprobs, stops, resume}.

A real pair with the fake model, whose text depends on every token before. `lookup_tree` is compared with plain
decoding, and `aggregate` with each shape of drafts with itself token by token, for both ways of joining the two sides.
With one seed a sampled answer is one text, so sampled answers are compared word for word, too. That their distribution
is the target's is tested on 100,000 draws in tests/strategies/test_distributions.py, and by each verifier's own tests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from lab.baselines.dragon import Shape, shaped
from paceline.core.side import SIDES
from tests.e2e.pair import QUESTION, Pair
from tests.reliability.conftest import Figure
from tests.reliability.honest import SCHEMA, STRICT, client_of

pytestmark = pytest.mark.anyio

SAMPLINGS: Mapping[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 1.0},
}
FEATURES: Mapping[str, dict[str, object]] = {
    "plain": {"max_tokens": 32},
    "schema": {"max_tokens": 64, "response_format": STRICT},
    "logprobs": {"max_tokens": 32, "logprobs": True, "top_logprobs": 3},
    "stops": {"max_tokens": 48, "stop": ["e ", "th", "."]},
}
ALONE = {"strategy": "autoregressive", "privacy": "local-only"}
SHAPES: tuple[Shape, ...] = ("tree", "chain", "sequence")
AT_ONCE = 8


Way = dict[str, object]  # fields of `paceline` in a request


def ways(rng: random.Random, every: bool, feature: str = "plain") -> list[tuple[str, Way, Way]]:
    """(side, the way that is the reference, another way that must give the same answer)"""
    found: list[tuple[str, Way, Way]] = []
    for side in SIDES:
        found.append((side, ALONE, ALONE | {"strategy": "lookup_tree"}))
        # Under `coin` no side has the distribution that a token was drawn from, so it gives no logprobs.
        aggregators = ("mixture",) if feature == "logprobs" else ("mixture", "coin")
        if feature == "logprobs" and side == "cloud":
            continue  # the device decides, and its distributions are private
        for aggregator, shape in itertools.product(aggregators, SHAPES):
            way = {"strategy": "aggregate", "privacy": "document-private"}
            none, some = shaped("none", aggregator=aggregator), shaped(shape, aggregator=aggregator)
            found.append((side, way | none, way | some))
    alone = [way for way in found if way[1] is ALONE]
    joint = [way for way in found if way[1] is not ALONE]
    return found if every else [rng.choice(alone), rng.choice(joint)]


async def answered(http: httpx.AsyncClient, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, (body, answer.text)
    return dict(answer.json())


def told(answer: Mapping[str, Any]) -> object:
    """What of a chat's answer must not depend on how it was computed."""
    assert answer["paceline"].get("degraded") is None, answer["paceline"]
    choice = answer["choices"][0]
    logprobs = [
        (entry["token"], round(entry["logprob"], 3), sorted((top["token"]) for top in entry["top_logprobs"]))
        for entry in (choice.get("logprobs") or {}).get("content") or ()
    ]
    return choice["message"]["content"], choice["finish_reason"], logprobs, answer["usage"]["completion_tokens"]


async def resumed(http: httpx.AsyncClient, body: Mapping[str, object], after: int) -> str:
    """Text of a response in the background, whose client leaves after so many events and comes back."""
    text, identifier, last = "", "", -1

    async def read(answer: httpx.Response, most: int | None) -> bool:
        nonlocal text, identifier, last
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert event["sequence_number"] == last + 1, "no event twice, none left out"
            last = event["sequence_number"]
            identifier = identifier or event["response"]["id"]
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            if event["type"] in ("response.completed", "response.incomplete"):
                return True
            if most is not None and last >= most:
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


def output(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content") or ())


async def test_an_answer_is_the_same_however_it_is_computed(
    pair: Pair, rng: random.Random, size: Callable[[int, int], int], figure: Figure
) -> None:
    prompts, every = size(1, 20), bool(size(0, 1))
    compared = schemas = 0
    gate = asyncio.Semaphore(AT_ONCE)

    async def compare(
        side: str, reference: Mapping[str, object], way: Mapping[str, object], asked: Mapping[str, object]
    ) -> None:
        nonlocal compared, schemas
        async with gate, client_of(pair.url("cloud" if side == "cloud" else "device")) as http:
            said = [
                await answered(http, "/v1/chat/completions", {**asked, "paceline": {**each, "report": True}})
                for each in (reference, way)
            ]
        assert told(said[0]) == told(said[1]), (side, reference, way, asked)
        compared += 1
        if "response_format" in asked:
            stay = json.loads(said[1]["choices"][0]["message"]["content"])
            assert set(stay) == set(SCHEMA["required"])  # type: ignore[call-overload]
            schemas += 1

    async def resume(side: str, way: Mapping[str, object], asked: Mapping[str, object]) -> None:
        nonlocal compared
        async with gate, client_of(pair.url("cloud" if side == "cloud" else "device")) as http:
            whole = await answered(http, "/v1/responses", {**asked, "paceline": way})
            assert await resumed(http, {**asked, "paceline": way}, rng.randrange(12)) == output(whole)
        compared += 1

    async with asyncio.TaskGroup() as tasks:
        for sampling, number in itertools.product(SAMPLINGS, range(prompts)):
            common = {"model": "fake", "seed": number + 1, **SAMPLINGS[sampling]}
            messages = [{"role": "user", "content": f"{QUESTION} {sampling} {number}"}]
            for feature, fields in FEATURES.items():
                for side, reference, way in ways(rng, every, feature):
                    tasks.create_task(compare(side, reference, way, {**common, **fields, "messages": messages}))
            if sampling == "greedy":  # /v1/responses has no seed
                asked = {"model": "fake", "input": messages, "max_output_tokens": 32, "temperature": 0}
                for side, way, _ in ways(rng, every):
                    if way is not ALONE:  # with `coin` the seed decides whose token it is, greedy or not
                        way = way | shaped("none", aggregator="mixture")  # the same way but for that
                    tasks.create_task(resume(side, way, asked))
    assert schemas >= 4
    figure("answers compared", compared)
    figure("mismatches", 0, at_most=0)
    figure("answers under a schema, all valid", schemas)
