"""Which strategy writes an answer, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest
from paceline.runtime.sessions.routing import ALONE, RoutingContext, choose_strategy

REQUEST = GenerateRequest(messages=({"role": "user", "content": "hello"},), sampling=SamplingParams(), max_tokens=8)
COMMON = ("autoregressive", "lookup_tree", "aggregate")
LINKED = RoutingContext("device", True, True, COMMON, own_documents=2, peer_documents=3)


def test_auto_reads_on_both_sides_where_there_are_documents() -> None:
    choice = choose_strategy(REQUEST, LINKED)
    assert (choice.strategy, choice.missing) == ("aggregate", False)
    assert "5 documents" in choice.why


@pytest.mark.parametrize(
    "situation",
    [replace(LINKED, own_documents=0, peer_documents=0), RoutingContext("cloud", False, False, (), 3, 0)],
)
def test_auto_needs_documents_and_a_peer(situation: RoutingContext) -> None:
    choice = choose_strategy(REQUEST, situation)
    assert (choice.strategy, choice.missing) == ("lookup_tree", False)


def test_a_peer_that_belongs_here_and_is_not_linked_is_said_to_be_missing() -> None:
    choice = choose_strategy(REQUEST, replace(LINKED, linked=False, common=()))
    assert (choice.strategy, choice.missing) == ("lookup_tree", True)
    asked = replace(REQUEST, strategy="aggregate")
    assert choose_strategy(asked, RoutingContext("cloud", False, False, (), 1, 0)).missing


def test_local_only_never_takes_a_peer() -> None:
    assert choose_strategy(replace(REQUEST, privacy="local-only"), LINKED).strategy == "lookup_tree"
    with pytest.raises(RequestError, match="local-only") as refused:
        choose_strategy(replace(REQUEST, privacy="local-only", strategy="aggregate"), LINKED)
    assert refused.value.param == "paceline.privacy"


def test_an_answer_that_is_private_is_written_by_the_device_alone() -> None:
    request = replace(REQUEST, privacy="answer-private")
    device = replace(LINKED, side="device")
    for strategy, written in (("auto", "lookup_tree"), ("autoregressive", "autoregressive")):
        for linked in (True, False):
            choice = choose_strategy(replace(request, strategy=strategy), replace(device, linked=linked))
            assert (choice.strategy, choice.missing) == (written, not linked)
    for nothing in ({"documents": 0}, {"prompt": (1, 2), "messages": ()}):
        choice = choose_strategy(replace(request, strategy="lookup_tree", **nothing), replace(device, linked=False))
        assert not choice.missing
    with pytest.raises(RequestError, match="'answer-private' forbids"):
        choose_strategy(replace(request, strategy="aggregate"), device)


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="ask the device"):
        choose_strategy(replace(REQUEST, privacy="answer-private"), replace(LINKED, side="cloud"))
    with pytest.raises(RequestError, match="autoregressive, lookup_tree, aggregate") as unknown:
        choose_strategy(replace(REQUEST, strategy="magic"), LINKED)
    assert unknown.value.param == "paceline.strategy"


def test_the_cloud_gives_logprobs_of_its_own_answers_only() -> None:
    request = replace(REQUEST, top_logprobs=2)
    cloud = replace(LINKED, side="cloud")
    assert choose_strategy(request, cloud).strategy == "lookup_tree"
    assert choose_strategy(request, LINKED).strategy == "aggregate"
    with pytest.raises(RequestError, match="distributions stay on the device"):
        choose_strategy(replace(request, strategy="aggregate"), cloud)


def test_raw_tokens_are_continued_by_one_side_and_miss_no_other() -> None:
    raw = replace(REQUEST, messages=(), prompt=(1, 2, 3))
    for situation in (LINKED, replace(LINKED, linked=False, common=())):
        choice = choose_strategy(raw, situation)
        assert (choice.strategy, choice.missing) == (ALONE, False)
    with pytest.raises(RequestError, match="raw tokens") as refused:
        choose_strategy(replace(raw, strategy="aggregate"), LINKED)
    assert refused.value.param == "paceline.strategy"
