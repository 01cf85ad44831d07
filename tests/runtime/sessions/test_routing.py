"""Choice of a strategy, its reason, and refusals."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as replace_struct

from paceline.errors import RequestError
from paceline.runtime.sessions.routing import (
    ALONE,
    AUTO_RULES,
    EXPLORED,
    MEASURED,
    Costs,
    StrategyChoice,
    candidates,
    choose,
)
from paceline.strategies.base import RoutingContext, Wish
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions, DraftLimits
from tests.requests import routed

COMMON = ("autoregressive", "lookup_tree", "aggregate")
ALONE_CLOUD = routed(RoutingContext("cloud", Wish()), own_documents=3)
LINKED = routed(
    ALONE_CLOUD, side="device", expected=True, linked=True, common=COMMON, own_documents=2, peer_documents=3
)


def chosen(context: RoutingContext, **changes: object) -> StrategyChoice:
    context = routed(context, **changes)
    return choose(candidates(context), routed(context, passages=1))


LARGER = routed(LINKED, common=(*COMMON, "draft_verify"), num_weights=5, peer_weights=70)


@pytest.mark.parametrize("changes", [{}, {"documents": 0}, {"own_documents": 0}, {"top_logprobs": 0}])
def test_a_larger_cloud_writes_where_nothing_private_was_found(changes: dict[str, object]) -> None:
    context = routed(LARGER, **changes)
    choice = choose(candidates(context), routed(context, passages=0))
    assert choice.strategy == "draft_verify"
    assert choice.reason == "nothing private is in the context, and the cloud's model is larger"


def test_auto_takes_what_keeps_a_budget_where_nothing_private_was_found() -> None:
    asked = routed(LARGER, options={"joules_per_token": 0.5})
    for side in ("device", "cloud"):
        context = routed(asked, side=side)
        assert choose(candidates(context), routed(context, passages=0)).strategy == "draft_verify"
    assert chosen(asked).strategy == "aggregate", "which has the request refused, with the reason"
    assert chosen(asked, common=COMMON).strategy == "aggregate"


def found(context: RoutingContext, passages: int) -> tuple[str, str]:
    choice = choose(candidates(context), routed(context, passages=passages))
    return choice.strategy, choice.reason


BOTH = ("aggregate", "the cloud is linked and the two sides hold 5 documents")
PRIVATE = ("lookup_tree", "the request's privacy level has this side alone write")
CLOUD = ("draft_verify", "nothing private is in the context, and the cloud may find something")


@pytest.mark.parametrize(
    ("changes", "nothing", "something"),
    [
        ({"peer_weights": 5}, CLOUD, BOTH),
        ({"num_weights": 0}, CLOUD, BOTH),
        ({"peer_weights": 5, "options": {"search_every": 16}}, BOTH, BOTH),
        ({"peer_weights": 5, "common": COMMON}, BOTH, BOTH),
        ({"peer_weights": 5, "documents": 0}, ("lookup_tree", "the request wants no documents"), None),
        ({"peer_weights": 5, "peer_documents": 0}, *2 * (("lookup_tree", "the cloud has no documents"),)),
        ({"peer_documents": 0}, None, ("lookup_tree", "the cloud has no documents")),
        ({"privacy": "answer-private"}, *2 * (PRIVATE,)),
    ],
)
def test_a_device_has_each_text_written_by_the_fastest_way_to_it(
    changes: dict[str, object], nothing: tuple[str, str] | None, something: tuple[str, str] | None
) -> None:
    """By what it has found itself; what the other side finds is known once that is asked."""
    for passages, expected in ((0, nothing), (1, something)):
        if expected is not None:
            assert found(routed(LARGER, **changes), passages) == expected


@pytest.mark.parametrize(
    ("changes", "nothing", "something"),
    [
        ({}, "aggregate", "aggregate"),
        ({"peer_documents": 0}, "aggregate", "lookup_tree"),
        ({"peer_documents": 0, "peer_weights": 5}, "lookup_tree", "lookup_tree"),
        ({"peer_documents": 0, "own_documents": 0}, "lookup_tree", "lookup_tree"),
    ],
)
def test_a_cloud_asks_a_device_for_what_that_may_find_or_its_model_writes(
    changes: dict[str, object], nothing: str, something: str
) -> None:
    """Never for drafts of a text that is the cloud's own."""
    context = routed(LARGER, side="cloud", **changes)
    assert (found(context, 0)[0], found(context, 1)[0]) == (nothing, something)


def test_the_fastest_of_the_ways_to_its_own_text_is_taken_and_the_reason_says_what_was_compared() -> None:
    costs = Costs({"lookup_tree": 1.0, "pipeline": 0.8})
    context = routed(ALONE_CLOUD, costs=costs.among(1))
    assert chosen(context).strategy == "pipeline", "before any is measured"
    costs.add("pipeline", 1, 0.04)
    assert chosen(routed(context, costs=costs.among(1))).strategy == "lookup_tree", "to be measured as well"
    for _ in range(MEASURED):
        costs.add("lookup_tree", 1, 0.02)
    choice = chosen(routed(context, costs=costs.among(1)))
    assert choice.strategy == "lookup_tree"
    assert choice.reason == "no device takes part; ms a token: 'lookup_tree' 20, 'pipeline' 40"
    assert chosen(routed(context, costs=costs.among(8))).strategy == "pipeline", "not measured among so many"
    assert chosen(routed(context, drafts=False)).strategy == "autoregressive"
    named = chosen(routed(context, strategy="pipeline", costs=costs.among(1)))
    assert (named.strategy, named.reason) == ("pipeline", "the request asks for it")


def test_a_device_has_the_cloud_write_by_the_faster_of_two_ways() -> None:
    costs = {"draft_verify": 0.02, "aggregate": 0.01}
    context = routed(LARGER, peer_costs=costs)
    assert found(context, 0) == (
        "aggregate",
        "nothing private is in the context, and the cloud's model is larger; "
        "ms a token: 'draft_verify' 20, 'aggregate' 10",
    )
    assert found(context, 1) == BOTH
    assert found(routed(context, common=("draft_verify",)), 0)[0] == "draft_verify"
    assert found(routed(context, options={"joules_per_token": 1.0}), 0)[0] == "draft_verify"


def test_one_answer_in_many_measures_what_seems_slower() -> None:
    costs, taken = Costs({"lookup_tree": 1.0, "pipeline": 0.5}), []
    truth = {"lookup_tree": 0.02, "pipeline": 0.04}
    for _ in range(2 * EXPLORED + 2):
        among = costs.among(1)
        taken.append(min(among, key=lambda name: among[name]))
        costs.add(taken[-1], 1, truth[taken[-1]])
    assert taken[: EXPLORED - 1] == ["pipeline"] * (EXPLORED - 1), "the other is thought to be much slower"
    assert taken[EXPLORED - 1 :].count("pipeline") == 1, "at the next time"


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (routed(LINKED, own_documents=0, peer_documents=0), "neither side has documents"),
        (routed(LINKED, documents=0), "the request wants no documents"),
        (ALONE_CLOUD, "no device takes part"),
    ],
)
def test_auto_needs_documents_and_a_peer(context: RoutingContext, reason: str) -> None:
    choice = chosen(context)
    assert (choice.strategy, choice.missing, choice.reason) == ("lookup_tree", False, reason)


def test_an_expected_peer_that_is_not_linked_is_reported_missing() -> None:
    choice = chosen(LINKED, linked=False, common=())
    assert (choice.strategy, choice.missing) == ("lookup_tree", True)
    assert chosen(ALONE_CLOUD, strategy="aggregate").missing
    old = chosen(LINKED, common=("lookup_tree",))
    assert (old.strategy, old.missing, old.reason) == ("lookup_tree", True, "the cloud does not know 'aggregate'")


def test_local_only_never_takes_a_peer() -> None:
    assert chosen(LINKED, privacy="local-only").strategy == "lookup_tree"
    with pytest.raises(RequestError, match="local-only") as refused:
        chosen(LINKED, privacy="local-only", strategy="aggregate")
    assert refused.value.param == "paceline.privacy"


def test_a_private_answer_is_written_by_the_device_alone() -> None:
    device = routed(LINKED, privacy="answer-private")
    for strategy, written in (("auto", "lookup_tree"), ("autoregressive", "autoregressive")):
        for linked in (True, False):
            choice = chosen(device, strategy=strategy, linked=linked)
            assert (choice.strategy, choice.missing) == (written, not linked)
    for nothing in ({"documents": 0}, {"raw_prompt": True}):
        assert not chosen(device, strategy="lookup_tree", linked=False, **nothing).missing
    with pytest.raises(RequestError, match="'answer-private' forbids"):
        chosen(device, strategy="aggregate")


def test_an_impossible_option_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="ask the device"):
        chosen(LINKED, privacy="answer-private", side="cloud")
    with pytest.raises(RequestError, match="autoregressive, lookup_tree, aggregate") as unknown:
        chosen(LINKED, strategy="magic")
    assert unknown.value.param == "paceline.strategy"


def test_the_cloud_gives_logprobs_of_its_own_answers_only() -> None:
    assert chosen(LINKED, top_logprobs=0, side="cloud").strategy == "lookup_tree"
    assert chosen(LINKED, top_logprobs=0).strategy == "aggregate"
    with pytest.raises(RequestError, match="distributions stay on the device"):
        chosen(LINKED, top_logprobs=0, side="cloud", strategy="aggregate")


def test_an_aggregator_without_distributions_gives_no_logprobs() -> None:
    for strategy in ("auto", "aggregate"):
        with pytest.raises(RequestError, match="no logprobs") as refused:
            chosen(LINKED, top_logprobs=0, strategy=strategy, options={"aggregator": "coin"})
        assert refused.value.param == "paceline.debug.aggregator"


def test_raw_tokens_are_continued_by_one_side_and_report_no_missing_peer() -> None:
    for context in (LINKED, routed(LINKED, linked=False, common=())):
        choice = chosen(context, raw_prompt=True)
        assert (choice.strategy, choice.missing) == (ALONE, False)
    with pytest.raises(RequestError, match="raw tokens") as refused:
        chosen(LINKED, raw_prompt=True, strategy="aggregate")
    assert refused.value.param == "paceline.strategy"


def test_options_reach_their_strategy_and_aggregate_sets_the_rest() -> None:
    asked = {"drafting": DraftLimits(1, 1, 0), "rescoring": False, "aggregator": ""}
    alone = chosen(LINKED, strategy="lookup_tree", options=asked).options
    assert alone == STRATEGIES["lookup_tree"].options(rescoring=False, drafting=DraftLimits(1, 1, 0))
    joint = chosen(LINKED, options=asked, top_logprobs=0).options
    mixture = AggregateOptions(False, DraftLimits(1, 1, 0), aggregator="mixture", needs_dists=True)
    assert joint == replace_struct(mixture, writer="device")
    assert chosen(LINKED, strategy="aggregate", options=asked, top_logprobs=0).options == mixture


def test_the_next_candidate_is_chosen_when_a_strategy_declines_after_retrieval(monkeypatch: pytest.MonkeyPatch) -> None:
    def declines(context: RoutingContext) -> None:
        assert context.passages == 1, "asked before retrieval"

    monkeypatch.setitem(STRATEGIES, "aggregate", routed(STRATEGIES["aggregate"], choose=declines))
    assert chosen(LINKED).reason == AUTO_RULES[-1].reason
    assert chosen(LINKED, strategy="aggregate").reason == "'aggregate' does not take what was retrieved"


def test_the_rules_of_auto_end_with_one_that_always_applies_and_never_declines() -> None:
    last = AUTO_RULES[-1]
    assert last.applies(LINKED) and last.applies(ALONE_CLOUD) and not STRATEGIES[last.strategy].needs_peer
