"""A device that takes no part: whether an answer was to be joint does not depend on who is linked now."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal, get_args

import pytest

from paceline.core.side import NOBODY, MayAsk
from paceline.errors import PacelineError, RequestError
from paceline.runtime.asking import AskCounter, CloudAsks
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest, OnLoss
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes

pytestmark = pytest.mark.anyio

Asked = Literal["key", "bound key", "name", "nothing"]
Device = Literal["linked", "away", "never enrolled"]

ASKED: dict[Asked, dict[str, Any]] = {
    "key": {"any_device": False},  # of a server with keys, bound to no device
    "bound key": {"any_device": False, "device": "laptop"},
    "name": {"device": "laptop", "names_device": True},
    "nothing": {},  # of a server without keys
}
JOINT, ALONE, MARKED, REFUSED = ("aggregate", None), ("lookup_tree", None), ("lookup_tree", "device_missing"), "503"


def expected(asked: Asked, device: Device, on_loss: OnLoss) -> object:
    if asked != "key" and device == "linked":
        return JOINT
    if on_loss != "continue":
        return REFUSED
    never_joint = asked == "key" or (asked == "nothing" and device == "never enrolled")
    return ALONE if never_joint else MARKED


async def outcome(cloud: Node, request: GenerateRequest) -> object:
    try:
        _, done = await collect(await cloud.prepare(request))
    except RequestError as refused:
        assert (refused.status, refused.code) == (503, "device_missing")
        return REFUSED
    return done.strategy, done.degraded


@pytest.mark.parametrize("device", get_args(Device))
async def test_what_was_to_be_joint_is_joint_marked_or_refused(device: Device) -> None:
    async with nodes(linked=device == "linked") as (bench, _):
        expects = lambda: device != "never enrolled"  # noqa: E731  # as the server's registry says
        bench.cloud._peers._company = replace(bench.cloud._peers._company, expects_peer=expects)
        for case in product(ASKED, get_args(OnLoss), ("auto", "aggregate")):
            asked, on_loss, strategy = case
            request = changed(REQUEST, strategy=strategy, on_loss=on_loss, max_tokens=4, **ASKED[asked])
            wanted = expected(asked, device, on_loss)
            if wanted == JOINT and strategy == "auto":
                continue  # without documents nothing is joined: `test_nothing_found`
            if wanted == ALONE and strategy == "aggregate":
                wanted = MARKED  # it asks for two sides by name
            assert await outcome(bench.cloud, request) == wanted, case


async def test_a_refusal_says_why_no_device_takes_part() -> None:
    async with nodes() as (bench, _):
        with pytest.raises(RequestError, match="no device 'labtop' is linked"):
            await bench.cloud.prepare(changed(REQUEST, on_loss="fail", device="labtop", names_device=True))
        with pytest.raises(RequestError, match=r"its key is bound to no device, and it names none in paceline.device"):
            await bench.cloud.prepare(changed(REQUEST, on_loss="pause", any_device=False))
        (link,) = bench.cloud._peers.links.values()
        bench.cloud._peers.links["phone"] = link
        _, done = await collect(await bench.cloud.prepare(changed(REQUEST, strategy="auto")))
        several = "no device takes part: several are linked, and it names none in paceline.device"
        assert (done.strategy_reason, done.degraded) == (several, None)
        _, done = await collect(await bench.cloud.prepare(REQUEST))
        assert (done.strategy_reason, done.degraded) == (several, "device_missing")
        with pytest.raises(RequestError, match="several are linked, and it names none"):
            await bench.cloud.prepare(changed(REQUEST, on_loss="fail"))
        del bench.cloud._peers.links["phone"]


async def test_a_device_that_may_not_be_asked_is_not_missed_while_it_is_away() -> None:
    async with nodes(may_ask=NOBODY) as (bench, _):
        bench.cloud._peers._company = replace(bench.cloud._peers._company, expects_peer=lambda: True)
        for _ in range(2):
            _, done = await collect(await bench.cloud.prepare(changed(REQUEST, strategy="auto")))
            assert (done.strategy, done.degraded) == ("lookup_tree", None)
            await bench.unlink()


# ---- a device that may not be asked by this client: refused where it insists, else answered without -----------------
SHORT = changed(REQUEST, max_tokens=4)
NAMED = changed(SHORT, device="laptop", names_device=True)


async def test_a_request_that_names_a_device_which_may_not_be_asked_is_refused_with_a_sentence() -> None:
    async with nodes(may_ask=NOBODY) as (bench, _):
        for request in (NAMED, changed(SHORT, on_loss="fail"), changed(SHORT, on_loss="pause", device="laptop")):
            with pytest.raises(RequestError, match="laptop may not be asked for this: its owner lets no") as refused:
                await bench.cloud.prepare(request)
            assert (refused.value.status, refused.value.code) == (403, "device_may_not_be_asked")


async def test_a_request_that_does_not_insist_is_answered_without_and_says_why() -> None:
    async with nodes(may_ask=NOBODY) as (bench, _):
        for strategy, degraded in (("auto", None), ("aggregate", "device_refused")):
            asked = changed(SHORT, strategy=strategy)
            _, done = await collect(await bench.cloud.prepare(asked))
            assert (done.strategy, done.degraded) == ("lookup_tree", degraded)
            assert done.strategy_reason == "the device is not asked: its owner lets no cloud ask it"
            _, bound = await collect(await bench.cloud.prepare(changed(asked, device="laptop")))
            assert bound.degraded == "device_refused", "the client's key is bound to that device"
        _, own = await collect(await bench.device.prepare(SHORT))
        assert own.strategy == "aggregate" and own.degraded is None, "the device itself is asked"


async def test_named_keys_are_joined_and_others_are_not() -> None:
    async with nodes(may_ask=MayAsk(("notebook",))) as (bench, _):
        _, done = await collect(await bench.cloud.prepare(changed(NAMED, asker="notebook")))
        assert done.strategy == "aggregate" and done.degraded is None
        with pytest.raises(RequestError, match="only named keys of the cloud"):
            await bench.cloud.prepare(changed(NAMED, asker="tablet"))


async def test_a_device_that_refuses_at_the_time_is_reported_with_its_reason() -> None:
    """Its permission lets the cloud ask, its budget does not."""
    async with nodes() as (bench, _):
        bench.device._peers._asks = CloudAsks(bench.may_ask, AskCounter(per_hour=1))
        _, first = await collect(await bench.cloud.prepare(SHORT))
        assert first.degraded is None
        _, second = await collect(await bench.cloud.prepare(SHORT))
        assert second.degraded == "device_refused"
        assert "it refuses: its budget of 1 questions an hour is used up" in second.strategy_reason
        with pytest.raises(PacelineError, match=r"refuses to take part \(its budget"):
            await collect(await bench.cloud.prepare(changed(SHORT, on_loss="fail")))
