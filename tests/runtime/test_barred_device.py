"""A request at a cloud whose device may not be asked by its client: refused where it insists, else answered without."""

from __future__ import annotations

import pytest

from paceline.core.side import NOBODY, MayAsk
from paceline.errors import PacelineError, RequestError
from paceline.runtime.asking import AskCounter, CloudAsks
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes

pytestmark = pytest.mark.anyio

ASKED = changed(REQUEST, max_tokens=4)
NAMED = changed(ASKED, device="laptop", names_device=True)


async def test_a_request_that_names_a_device_which_may_not_be_asked_is_refused_with_a_sentence() -> None:
    async with nodes(may_ask=NOBODY) as (bench, _):
        for request in (NAMED, changed(ASKED, on_loss="fail"), changed(ASKED, on_loss="pause", device="laptop")):
            with pytest.raises(RequestError, match="laptop may not be asked for this: its owner lets no") as refused:
                await bench.cloud.prepare(request)
            assert (refused.value.status, refused.value.code) == (403, "device_may_not_be_asked")


async def test_a_request_that_does_not_insist_is_answered_without_and_says_why() -> None:
    async with nodes(may_ask=NOBODY) as (bench, _):
        for strategy, degraded in (("auto", None), ("aggregate", "device_refused")):
            asked = changed(ASKED, strategy=strategy)
            _, done = await collect(await bench.cloud.prepare(asked))
            assert (done.strategy, done.degraded) == ("lookup_tree", degraded)
            assert done.strategy_reason == "the device is not asked: its owner lets no cloud ask it"
            _, bound = await collect(await bench.cloud.prepare(changed(asked, device="laptop")))
            assert bound.degraded == "device_refused", "the client's key is bound to that device"
        _, own = await collect(await bench.device.prepare(ASKED))
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
        _, first = await collect(await bench.cloud.prepare(ASKED))
        assert first.degraded is None
        _, second = await collect(await bench.cloud.prepare(ASKED))
        assert second.degraded == "device_refused"
        assert "it refuses: its budget of 1 questions an hour is used up" in second.strategy_reason
        with pytest.raises(PacelineError, match=r"refuses to take part \(its budget"):
            await collect(await bench.cloud.prepare(changed(ASKED, on_loss="fail")))
