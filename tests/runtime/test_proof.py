"""An answer's proof: answers of every strategy are proven, a token that was changed is found where it stands, and what
is not what it was is said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer
from paceline.errors import RequestError
from paceline.runtime.node import Node
from paceline.runtime.policy import PolicyGuard
from paceline.runtime.service import AnswerRecord, GenerateRequest
from paceline.runtime.sessions.prepared import hashed
from paceline.strategies.base import SIDES, Side
from tests.depth import DEPTH
from tests.requests import a_request, changed
from tests.runtime.test_node import Bench, GatedEngine, bench_of, collect, side_by_side, stores_of
from tests.runtime.test_policy import policy

pytestmark = pytest.mark.anyio

TEXTS: Final[Mapping[Side, Mapping[str, str]]] = {
    "cloud": {
        "0.txt": "The key of the mill is in the harbour.",
        "1.txt": "A heron stands in the harbour every morning.",
    },
    "device": {"0.txt": "My own key hangs in the hall.", "1.txt": "The key of the hall was painted green last year."},
}
ASKED: Final = a_request(
    messages=({"role": "user", "content": "Where is the key of the hall?"},),
    sampling=SamplingParams(temperature=1.0, seed=5),
    max_tokens=12,
)
# Every second one is written by every second way, so that `greedy` and `penalties`, of two models, go by all ways.
FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "penalties": {
        "sampling": SamplingParams(
            temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2, logit_bias={101: 2.0}
        )
    },
    "filtered": {"sampling": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01)},
    "stop strings": {"sampling": SamplingParams(temperature=1.0), "stop": ("a", "th", "e ")},
    "a form": {"sampling": SamplingParams(temperature=1.0), "constraint": Constraint("regex", "[a-m ]{3,12}[.!]")},
    "in stretches": {"sampling": SamplingParams(temperature=1.0), "options": {"search_every": 8}},
    "by a coin": {"sampling": SamplingParams(temperature=1.0), "options": {"aggregator": "coin"}},
    "as in the paper": {"sampling": SamplingParams(temperature=1.0), "options": {"aggregator": "paper"}},
}
JOINT: Final = ("in stretches", "by a coin", "as in the paper")
ALONE: Final = {"privacy": "local-only"}
WAYS: Final[Sequence[tuple[Side, Mapping[str, Any]]]] = (
    *(("device", {"strategy": name, **ALONE}) for name in ("autoregressive", "lookup_tree", "pipeline")),
    ("cloud", {"strategy": "lookup_tree", **ALONE}),
    ("device", {"strategy": "lookup_tree", "privacy": "answer-private"}),
    ("device", {"strategy": "draft_verify", "documents": 0}),
    ("cloud", {"strategy": "draft_verify"}),
    *((side, {"strategy": "aggregate"}) for side in SIDES),
    ("device", {"strategy": "aggregate", "privacy": "open"}),
)


@asynccontextmanager
async def pair(folder: Path, *, same: bool) -> AsyncIterator[Bench]:
    """Two linked nodes with documents. same: of one model."""
    engines: dict[Side, GatedEngine] = {"cloud": GatedEngine(3), "device": GatedEngine(3 if same else 4)}
    models = {side: LoadedModel(engine, ByteTokenizer()) for side, engine in engines.items()}
    for engine in engines.values():
        engine.open = True
    with stores_of(folder, TEXTS) as stores:
        async with side_by_side(bench := bench_of(models, stores, engines=engines)):
            yield bench
    for engine in engines.values():
        assert not engine.held(), "blocks leaked"


async def answered(node: Node, request: GenerateRequest) -> tuple[AnswerRecord, ...]:
    """What is kept of an answer, as the log keeps it."""
    _, done = await collect(await node.prepare(request))
    assert done.degraded is None, done
    return msgspec.json.decode(msgspec.json.encode(done.records), type=tuple[AnswerRecord, ...])


def said(records: Sequence[AnswerRecord]) -> int:
    return sum(len(record.tokens) + record.ends for record in records)


@pytest.mark.parametrize(
    ("form", "same"), [*((form, True) for form in FORMS), *((form, False) for form in ("greedy", "penalties", *JOINT))]
)
async def test_an_answer_of_any_strategy_is_proven(tmp_path: Path, form: str, same: bool) -> None:
    """same: the models of both sides. At a greater depth every form is written in every way, else in every second."""
    ended, ways = 0, [*enumerate(WAYS)]
    if form in JOINT:
        ways = [(number, (front, how)) for number, (front, how) in ways if how["strategy"] == "aggregate"]
    elif DEPTH == 1:
        ways = ways[[*FORMS].index(form) % 2 :: 2]
    async with pair(tmp_path, same=same) as bench:
        for number, (front, how) in ways:
            node: Node = getattr(bench, front)
            for seed in range(DEPTH):
                request = changed(ASKED, **FORMS[form], **how)
                request = changed(request, sampling=replace(request.wish.sampling, seed=100 * number + seed))
                records = await answered(node, request)
                assert {record.strategy for record in records} == {how["strategy"]}
                proof = await node.prove(request, records)
                assert proof.tokens == said(records) > 1
                assert (proof.differing, proof.unproven, proof.proven) == ([], {}, proof.tokens), (front, how)
                alone = same and front == "device"  # what the cloud has read is public, and its model is here
                joint = how["strategy"] == "aggregate" or (how["strategy"] == "draft_verify" and front == "device")
                assert proof.asked == (proof.tokens if joint and not alone else 0), (front, how)
                ended += sum(record.ends for record in records)
    assert ended or form != "a form"


@pytest.mark.parametrize(("front", "how"), [WAYS[1], WAYS[-3], WAYS[-2]], ids=["alone", "computed here", "asked again"])
async def test_a_changed_token_is_found_where_it_stands(tmp_path: Path, front: Side, how: Mapping[str, Any]) -> None:
    async with pair(tmp_path, same=how["strategy"] == "aggregate" and front == "device") as bench:
        node: Node = getattr(bench, front)
        request = changed(ASKED, **how, max_tokens=6)
        (record,) = await answered(node, request)
        for index, token in enumerate(record.tokens):
            tokens = [*record.tokens]
            tokens[index] = 65 + (token == 65)
            proof = await node.prove(request, [msgspec.structs.replace(record, tokens=tokens)])
            first = proof.differing[0]
            assert (first.index, first.token, first.owed) == (index, tokens[index], token)
            assert first.names == (chr(tokens[index]), node._resources.tokenizer.token_name(token))
            assert (proof.unproven, proof.tokens) == ({}, said([record]))
        longer = msgspec.structs.replace(record, tokens=record.tokens[:-2], ends=True)
        (end,) = (await node.prove(request, [longer])).differing
        assert (end.index, end.token, end.owed) == (4, None, record.tokens[-2])


async def test_what_is_not_what_it_was_is_said_and_nothing_of_it_counts_as_proven(tmp_path: Path) -> None:
    reasons: dict[str, str] = {}

    async def unproven(name: str, request: GenerateRequest, record: AnswerRecord, node: Node) -> None:
        proof = await node.prove(request, [record])
        ((reasons[name], tokens),) = proof.unproven.items()
        assert (proof.differing, proof.proven, tokens) == ([], 0, proof.tokens) and tokens > 0

    async with pair(tmp_path, same=True) as bench:
        device, cloud = bench.device, bench.cloud
        joint, alone = changed(ASKED, strategy="aggregate"), changed(ASKED, strategy="lookup_tree", **ALONE)
        (both,), (own,) = await answered(device, joint), await answered(device, alone)
        other_words = changed(alone, messages=({"role": "user", "content": "Where was the key?"},))
        await unproven("conversation", other_words, own, device)
        await unproven("model", alone, msgspec.structs.replace(own, model="f" * 64), device)
        await unproven("side", alone, own, cloud)
        with closing(PolicyGuard("device", policy(("never leaves", "*.txt")))) as guard:
            device._resources.guard, before = guard, device._resources.guard
            await unproven("rules", joint, both, device)
        with closing(PolicyGuard("device", policy(budgets={"joules": 0.0}))) as guard:
            device._resources.guard = guard
            with pytest.raises(RequestError, match="used up"):
                await device.prove(alone, (own,))
            device._resources.guard = before
        await unproven("fault", alone, msgspec.structs.replace(own, fault="It is approximate."), device)
        (private,) = await answered(device, changed(ASKED, strategy="lookup_tree", privacy="answer-private"))
        store = cloud._resources.store
        assert store is not None
        store.remove(*(document.id for document in store.documents()))
        await unproven("the cloud's", joint, both, device)
        await unproven("the cloud's passages", changed(alone, privacy="answer-private"), private, device)
        store = device._resources.store
        assert store is not None
        store.remove(*(document.id for document in store.documents()))
        await unproven("documents", alone, own, device)
        await bench.unlink()
        await unproven(
            "link", joint, msgspec.structs.replace(both, passages=[], prompts=own_prompts(device, joint)), device
        )
    assert reasons == {
        "conversation": "The conversation, or a document that it has read, is not what it was.",
        "model": "It was written by another model than the one that is served here now.",
        "side": "It was written by another model than the one that is served here now.",
        "rules": "The owner's rules hold for what it has read: a proof does not read it again.",
        "fault": "It is approximate.",
        "the cloud's": "The other side has read other passages than then.",
        "the cloud's passages": "Passages of the cloud that it has read cannot be had now, or are others.",
        "documents": "A document that it has read has been changed or removed since.",
        "link": "The other side, which took part, is not linked, or has another model now.",
    }


def own_prompts(node: Node, request: GenerateRequest) -> list[tuple[str, float | None]]:
    """As they are recorded where no document is read."""
    return [(hashed(node._resources.tokenizer.chat(request.prompt.messages)), None)]
