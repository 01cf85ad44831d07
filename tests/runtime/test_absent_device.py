"""Whether an answer was to be joint does not depend on who is linked now: a table of all cases at a cloud."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal, get_args

import pytest

from paceline.core.side import NOBODY
from paceline.errors import RequestError
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
        with pytest.raises(RequestError, match=r"its key is bound to no device, and it names none in paceline.device"):
            await bench.cloud.prepare(changed(REQUEST, on_loss="pause", any_device=False))
        (link,) = bench.cloud._peers.links.values()
        bench.cloud._peers.links["phone"] = link
        _, done = await collect(await bench.cloud.prepare(changed(REQUEST, strategy="auto")))
        assert (done.strategy_reason, done.degraded) == ("no device takes part", None)
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
