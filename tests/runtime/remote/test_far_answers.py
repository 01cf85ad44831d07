"""Answers of a node whose model is behind servers: the text of a node that runs the model, by every strategy."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.engine.base import LoadedModel, ModelInfo, ServedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine, fake_model
from paceline.engine.remote.opening import open_remote
from paceline.errors import EngineError, EngineRefusal
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest, GenerationResult, TextDelta
from tests.requests import a_request, changed
from tests.runtime.remote.standin import LEAST, Server, StandIn, installed
from tests.runtime.test_node import collect, linked

pytestmark = pytest.mark.anyio

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(seed=5)
ASKED = a_request(messages=({"role": "user", "content": "Where is the key?"},), sampling=GREEDY, max_tokens=30)


@asynccontextmanager
async def far_node(stand_in: StandIn, *hosts: str) -> AsyncIterator[Node]:
    with installed(stand_in, *(hosts or ("one",))) as urls:
        text = ByteTokenizer()
        node = Node("cloud", ServedModel(open_remote(urls, Path(), text, name="fake"), text), None)
        async with asyncio.timeout(30), node:
            for server in stand_in.servers.values():
                server.calls.clear()
            yield node


async def here(request: GenerateRequest, strategy: str = "autoregressive") -> str:
    """The text of a node that runs the stand-in's model."""
    async with Node("cloud", LoadedModel(FakeEngine(seed=1, spread=0.3), ByteTokenizer()), None) as node:
        return (await collect(await node.prepare(changed(request, strategy=strategy))))[0]


def server_of(stand_in: StandIn) -> Server:
    (server,) = stand_in.servers.values()
    return server


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, logit_bias={101: -100.0, 113: 3.0}),
    ],
)
async def test_a_plain_answer_is_one_call_and_the_text_of_the_model(params: SamplingParams) -> None:
    stand_in, request = StandIn(), changed(ASKED, sampling=params)
    async with far_node(stand_in) as node:
        text, done = await collect(await node.prepare(request))
        ((path, body),) = server_of(stand_in).calls
    assert text == await here(request) and done.strategy == "autoregressive"
    assert path == "/v1/completions" and body["stream"]


async def test_a_sampled_plain_answer_is_the_server_s_own_draw_and_the_same_for_a_seed() -> None:
    stand_in, request = StandIn(), changed(ASKED, sampling=SAMPLED)
    async with far_node(stand_in) as node:
        texts = {(await collect(await node.prepare(request)))[0] for _ in range(2)}
        other = await collect(await node.prepare(changed(request, sampling=SamplingParams(seed=6))))
        fields = server_of(stand_in).calls[0][1]
    assert len(texts) == 1 and other[0] not in texts
    assert (fields["seed"], fields["temperature"], fields["top_p"], fields["top_k"]) == (5, 1.0, 1.0, 0)


@dataclass(eq=False)
class Spoiling(StandIn):
    """Of every second row of a stream the token's own log-probability is told, and what fills the rest."""

    def _answer(self, request: httpx.Request) -> httpx.Response | Iterator[bytes]:
        answer = super()._answer(request)
        return answer if isinstance(answer, httpx.Response) else map(self._spoilt_event, itertools.count(), answer)

    def _spoilt_event(self, number: int, event: bytes) -> bytes:
        if number % 2 or not event.startswith(b"data: {"):
            return event
        ((choice,),) = json.loads(event[6:]).values()
        own = f"token_id:{choice['token_ids'][0]}"
        (tops,) = choice["logprobs"]["top_logprobs"]
        choice["logprobs"]["top_logprobs"] = [{own: tops[own], "token_id:0": LEAST}]
        return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@pytest.mark.parametrize("kind", [StandIn, Spoiling])
async def test_logprobs_come_with_the_stream(kind: type[StandIn]) -> None:
    stand_in = kind()
    async with far_node(stand_in) as node:
        session = await node.prepare(changed(ASKED, top_logprobs=3, max_tokens=6))
        deltas = [event async for event in session.run() if isinstance(event, TextDelta)]
    found = [each for delta in deltas for each in delta.logprobs]
    assert len(found) == 6
    text = "".join(delta.text for delta in deltas)
    prompt = ByteTokenizer().chat(ASKED.prompt.messages)
    for number, (chosen, top) in enumerate(found):
        row = stand_in.dist([*prompt, *text[:number].encode()])
        assert chosen.logprob == pytest.approx(math.log(row.prob(ord(text[number]))), abs=1e-6)
        assert [each.logprob for each in top] == pytest.approx([math.log(prob) for _, prob in row.top(3)], abs=1e-6)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
async def test_a_constraint_costs_a_call_a_token_and_holds(params: SamplingParams) -> None:
    stand_in = StandIn()
    request = changed(ASKED, sampling=params, constraint=Constraint("regex", "(in|at) the (box|sea|house)"))
    async with far_node(stand_in) as node:
        text, _ = await collect(await node.prepare(request))
    assert text == await here(request)


async def test_an_answer_that_may_not_end_yet_is_streamed() -> None:
    stand_in = StandIn()
    request = changed(ASKED, max_tokens=120, constraint=Constraint("text", ignore_eos=True))
    async with far_node(stand_in) as node:
        text, done = await collect(await node.prepare(request))
        assert len(server_of(stand_in).calls) == 1
    assert done.reason == "length" and text == await here(request)


@pytest.mark.parametrize("front", ["cloud", "device"])
@pytest.mark.parametrize("strategy", ["draft_verify", "aggregate"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
async def test_a_device_and_far_servers_write_what_a_device_and_a_cloud_write(
    params: SamplingParams, strategy: str, front: str
) -> None:
    """Joint ones mixed at temperature 0, and by a coin above."""
    request = changed(ASKED, sampling=params, strategy=strategy, max_tokens=20, seeded=False)
    stand_in, texts = StandIn(), list[str]()
    with installed(stand_in, "one") as urls:
        words = ByteTokenizer()
        far = ServedModel(open_remote(urls, Path(), words, name="fake"), words)
        near = LoadedModel(FakeEngine(seed=1, spread=0.3), words)
        for model in (far, near):
            async with linked(model, fake_model(2, 0.3)) as bench:
                text, done = await collect(await getattr(bench, front).prepare(request))
                texts.append(text)
            assert done.strategy == strategy and done.degraded is None
            if front == "cloud" or strategy == "draft_verify":  # else more of a row may be asked for than is known
                assert "approximate" not in done.strategy_reason
    assert texts[0] == texts[1]


@pytest.mark.parametrize("far", [True, False], ids=["servers", "engine"])
@pytest.mark.parametrize("front", ["cloud", "device"])
async def test_the_report_tells_that_the_cloud_s_tokens_are_approximate(front: str, *, far: bool) -> None:
    """Because of a row of which its servers do not tell enough, or always, by an engine whose rows depend on others."""
    stand_in, words = StandIn(head=5, ignores=frozenset({"logprob_token_ids"})), ByteTokenizer()

    class Doubtful(FakeEngine):
        @property
        def info(self) -> ModelInfo:
            return replace(super().info, doubt="its rows depend on others")

    engine = Doubtful(seed=1, spread=0.3)
    request = changed(ASKED, sampling=SamplingParams(seed=5, temperature=1.8), strategy="draft_verify", max_tokens=40)
    with installed(stand_in, "one") as urls:
        model = ServedModel(open_remote(urls, Path(), words, name="fake"), words) if far else LoadedModel(engine, words)
        async with linked(model, fake_model(2, 0.3)) as bench:
            _, done = await collect(await getattr(bench, front).prepare(request))
    why = "the model's server tells only the likeliest tokens" if far else "its rows depend on others"
    assert done.strategy == "draft_verify" and not model.engine.info.is_exact
    assert done.strategy_reason.endswith(f"approximate: {why}" if front == "cloud" else "; approximate at the cloud")


@pytest.mark.parametrize("lost", ["link", "servers"])
@pytest.mark.parametrize("front", ["cloud", "device"])
@pytest.mark.parametrize("strategy", ["draft_verify", "aggregate"])
async def test_what_is_lost_in_mid_answer_is_gone_on_without(strategy: str, front: str, lost: str) -> None:
    """A side that faces the client goes on alone; without its own model's servers it cannot."""
    request = changed(ASKED, strategy=strategy, max_tokens=40, seeded=False)
    stand_in, words = StandIn(), ByteTokenizer()
    with installed(stand_in, "one") as urls:
        far = ServedModel(open_remote(urls, Path(), words, name="fake"), words)
        async with linked(far, fake_model(2, 0.3)) as bench:
            session, tokens, done = await getattr(bench, front).prepare(request), 0, None
            with (
                pytest.raises(EngineRefusal, match="none of the model's servers answers")
                if ((front, lost) == ("cloud", "servers"))
                else nullcontext()
            ):
                async for event in session.run():
                    if not isinstance(event, TextDelta):
                        done = event
                    elif not tokens:
                        tokens += event.tokens
                        if lost == "servers":
                            server_of(stand_in).down = True
                        else:
                            await bench.unlink()
                assert isinstance(done, GenerationResult) and done.completion_tokens == 40
                assert done.degraded == ("device_lost" if front == "cloud" else "cloud_lost")


async def test_a_stream_that_is_cut_goes_on_at_another_server() -> None:
    stand_in = StandIn()
    async with far_node(stand_in, "one", "two") as node:
        for server in stand_in.servers.values():
            server.cut_after = 7
        text, done = await collect(await node.prepare(ASKED))
        assert all(server.calls for server in stand_in.servers.values())
    assert text == await here(ASKED) and done.reason in ("length", "stop")


TOO_LONG = '{"error": {"message": "This model\'s maximum context length is 9 tokens", "code": 400}}'


@pytest.mark.parametrize(
    ("statuses", "status", "code", "after"),
    [
        ((429, 429), 429, "rate_limit_exceeded", 7),
        ((429, 503), 429, "rate_limit_exceeded", 7),
        ((429, None), 429, "rate_limit_exceeded", 7),
        ((503, 503), 503, "model_unavailable", 7),
        ((500, None), 503, "model_unavailable", None),
        ((None, None), 503, "model_unavailable", None),
        ((400, 400), 400, "context_length_exceeded", None),
    ],
)
@pytest.mark.parametrize("constraint", [None, Constraint("regex", "yes|no")], ids=["stream", "calls"])
async def test_what_all_servers_say_is_what_the_client_hears(
    statuses: tuple[int | None, ...], status: int, code: str, after: int | None, constraint: Constraint | None
) -> None:
    stand_in = StandIn()
    async with far_node(stand_in, "one", "two") as node:
        for server, each in zip(stand_in.servers.values(), statuses, strict=True):
            server.down, server.status, server.said = each is None, each, TOO_LONG
            server.retry_after = "7" if each in (429, 503) else None
        with pytest.raises(EngineRefusal) as refused:
            await collect(await node.prepare(changed(ASKED, constraint=constraint)))
    error = refused.value
    assert (error.status, error.code) == (status, code)
    assert after is None or error.retry_after == after


async def test_without_any_server_an_answer_fails_with_a_sentence_and_a_later_one_is_written() -> None:
    stand_in = StandIn()
    async with far_node(stand_in) as node:
        server = server_of(stand_in)
        server.down = True
        with pytest.raises(EngineError, match="none of the model's servers answers"):
            await collect(await node.prepare(ASKED))
        server.down = False
        assert (await collect(await node.prepare(ASKED)))[0] == await here(ASKED)


async def test_a_client_that_leaves_ends_the_server_s_work() -> None:
    stand_in = StandIn()
    async with far_node(stand_in) as node:
        server, session = server_of(stand_in), await node.prepare(changed(ASKED, max_tokens=200))
        events = session.run()
        await anext(events)
        server.gate = asyncio.Event()  # never set: a slow answer
        await session.aclose()
        while not server.streams_closed:
            await asyncio.sleep(0)


async def test_a_server_that_returns_text_alone_writes_plain_answers_and_no_others() -> None:
    stand_in = StandIn(ignores=frozenset({"return_token_ids"}))
    async with far_node(stand_in) as node:
        assert (await collect(await node.prepare(ASKED)))[0] == await here(ASKED)
        constrained = changed(ASKED, constraint=Constraint("regex", "yes|no"))
        with pytest.raises(EngineError, match="plain answers alone"):
            await collect(await node.prepare(constrained))


async def test_what_an_owner_asks_shares_rows_with_his_other_prompts_alone() -> None:
    stand_in = StandIn()
    async with far_node(stand_in) as node:
        for owner in ("anna", "anna", "bert"):
            await collect(await node.prepare(changed(ASKED, owner=owner)))
        salts = [body["cache_salt"] for _, body in server_of(stand_in).calls]
    assert salts[0] == salts[1] != salts[2]
