"""A strategy of both sides defined by this file alone: machines, message, options, record.

The front writes its own text token by token. Every few tokens it sends a salt, which its peer echoes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import pytest

from lab.simulation import Simulation
from paceline.core.clock import StepClock
from paceline.core.sampling.dist import Dist
from paceline.errors import RemoteProtocolError, RequestError
from paceline.runtime.sessions.routing import candidates, choose
from paceline.strategies.base import (
    JOINT_LEVELS,
    SIDES,
    Branch,
    Effect,
    MachineConfig,
    RoutingContext,
    Sampled,
    Scored,
    Send,
    Side,
    Strategy,
    asked_options,
    other,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.joint import Joint, JointAnswer
from paceline.strategies.registry import STRATEGIES, register
from paceline.wire import codec
from paceline.wire.codec import decode, encode
from paceline.wire.messages import Count, OpenSession, Options, SessionMessage
from tests.requests import changed, routed
from tests.runtime.test_node import REQUEST, collect, nodes
from tests.strategies.cases import SAMPLINGS, Manner, engines, job, manners
from tests.strategies.conformance.laws import (
    EVERY_FRONT,
    QUICK,
    check_alone,
    check_cancel,
    check_flap,
    check_lane_alone,
    check_loss,
    check_repeats,
    check_return,
    check_text,
    reference,
)
from tests.strategies.conformance.worlds import IN_ORDER, REORDERING

MAX_PERIOD = 32  # tokens; the peer refuses more


# ---- the strategy ---------------------------------------------------------------------------------------------------
class SaltOptions(Options, frozen=True):
    period: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4  # tokens between two salts


class Salt(SessionMessage, frozen=True, tag="toy-salt"):
    kind = "salt"

    position: Count
    salt: Annotated[bytes, msgspec.Meta(max_length=8)]

    def fault(self, vocab_size: int | None) -> str | None:  # noqa: ARG002  # for other messages
        return None if self.salt else "an empty salt - at `$.salt`"


class Salted(Joint):
    """The front writes its own text and counts the echoes of its salts; its peer echoes them."""

    watches = False

    def __init__(self, config: MachineConfig) -> None:
        assert isinstance(config.options, SaltOptions)
        self._period = config.options.period
        tree = PrefixTree(len(config.seat.targets))
        decoder = BranchDecoder(config.output, rescoring=config.options.rescoring)
        super().__init__(config, tree, decoder, JointAnswer(config, tree), StepClock())
        self._echoes = 0
        self._meet_peer()

    def _meet_peer(self) -> None:
        self._expected: dict[int, bytes] = {}

    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        return super()._begin(branches, max_new_tokens) if self._config.seat.faces_client else []

    def _brings_on(self, message: SessionMessage) -> bool:
        return isinstance(message, Salt)

    def _received(self, message: SessionMessage) -> list[Effect]:
        assert isinstance(message, Salt)
        if not self._config.seat.faces_client:
            return [Send(message)]
        self._echoes += self._expected.pop(message.position, None) == message.salt
        return []

    def _computed(self, event: Scored | Sampled, nodes: Sequence[PrefixNode]) -> list[Effect]:  # noqa: ARG002
        return self._advance() if nodes else []

    def _append(self, token: int, lane: Side | None, dist: Dist | None) -> list[Effect]:
        effects, position = super()._append(token, lane, dist), len(self._answer.targets)
        if self._linked and effects and position % self._period == 0:
            self._expected[position] = bytes((position % 256, token % 256))
            effects.append(Send(Salt(0, self._epoch, position, self._expected[position])))
        return effects

    def _advance(self) -> list[Effect]:
        return self._write_alone()

    def _synchronise(self, *, progressed: bool) -> list[Effect]:  # noqa: ARG002  # a hook
        return []

    def stats(self) -> dict[str, float]:
        return {"echoes": float(self._echoes)}


def choose_options(context: RoutingContext) -> SaltOptions | None:
    """It declines more than two passages."""
    return None if (context.passages or 0) > 2 else asked_options(SaltOptions, context)


def check(context: RoutingContext) -> None:
    if context.wish.strategy == "salted" and context.wish.logprobs:
        raise RequestError("The strategy 'salted' gives no logprobs.", param="logprobs")


def accepts(opening: OpenSession, options: Options) -> str | None:  # noqa: ARG001  # a hook's signature
    assert isinstance(options, SaltOptions)
    return None if options.period <= MAX_PERIOD else f"it echoes at least every {MAX_PERIOD} tokens"


SALTED = Strategy(
    name="salted",
    machine=Salted,
    needs_peer=True,
    text_of="front",
    options=SaltOptions,
    messages=(Salt,),
    privacy_levels=JOINT_LEVELS,
    check=check,
    choose=choose_options,
    accepts=accepts,
)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """The strategy is known in this module, and its tag nowhere afterwards. A strategy of the package needs no fixture:
    its name in `registry` is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_known", codec._known)
        register(SALTED)
        yield
        del STRATEGIES[SALTED.name]


# ---- conformance ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("front", "reorders"), [("cloud", False), ("device", True)], ids=["in order", "reordering"])
def test_it_keeps_the_laws(front: Side, reorders: bool) -> None:
    network, sampling = REORDERING if reorders else IN_ORDER, SAMPLINGS["sampled"]
    for manner in manners(SALTED).values():
        for each in SAMPLINGS.values():
            check_text(SALTED, manner, front, each, range(QUICK), reorders=reorders)
        check_loss(SALTED, manner, front, sampling, network, every=2)
        check_flap(SALTED, manner, front, sampling, range(QUICK), reorders=reorders)
    check_cancel(SALTED, Manner(), front, network, every=1)
    check_return(SALTED, Manner(), front, range(6), network)
    check_alone(SALTED, Manner(), front)
    check_lane_alone(SALTED, Manner(), front)
    check_repeats(SALTED, Manner(), front, reorders=reorders)


# ---- options, messages, bytes ---------------------------------------------------------------------------------------
@EVERY_FRONT
@pytest.mark.parametrize("period", [1, 5])
def test_the_option_reaches_the_machine_and_the_messages_are_counted(front: Side, period: int) -> None:
    request = job(SALTED, front, SAMPLINGS["sampled"], options=SaltOptions(rescoring=False, period=period))
    world = Simulation(request, engines(), network=IN_ORDER, forward={front: 0.2})
    answer = world.run()
    assert answer.tokens == reference(SALTED, front, SAMPLINGS["sampled"], Manner())
    salts = [sent for sent in world.messages if isinstance(sent.message, Salt)]
    asked = [sent for sent in salts if sent.sender == front]
    assert len(asked) == len(answer.tokens) // period
    in_time = (len(answer.tokens) - 1) // period  # the echo of a salt that is sent with the last token comes too late
    assert answer.finished is not None and answer.finished.stats["echoes"] == in_time > 0
    assert answer.egress.stats()["sent_salt_bytes"] == sum(sent.num_bytes for sent in asked)


def test_a_peer_that_refuses_the_options_leaves_the_front_alone() -> None:
    request = job(SALTED, "cloud", SAMPLINGS["greedy"], options=SaltOptions(rescoring=False, period=40))
    world = Simulation(request, engines(), network=IN_ORDER)
    assert world.run().tokens == reference(SALTED, "cloud", SAMPLINGS["greedy"], Manner())
    peer = world.session("device")
    assert (peer.openings, peer.refusal) == (0, "it echoes at least every 32 tokens")


def test_its_message_is_decoded_and_checked_as_any_other() -> None:
    message = Salt(3, 1, 8, b"\x08\x41")
    assert decode(encode(message)) == message
    with pytest.raises(RemoteProtocolError, match=r"empty salt - at `\$\.salt`"):
        decode(encode(Salt(3, 1, 8, b"")))
    with pytest.raises(RemoteProtocolError, match=r"\$\.salt"):
        decode(encode(Salt(3, 1, 8, bytes(9))))
    with pytest.raises(ValueError, match="salted"):
        register(SALTED)


# ---- routing --------------------------------------------------------------------------------------------------------
ASKED = changed(REQUEST, strategy="salted", options={"period": 7})


def test_it_is_routed_where_a_request_names_it() -> None:
    known = RoutingContext("device", ASKED.wish, expected=True, linked=True, common=("salted",))
    choice = choose(candidates(known), known)
    assert (choice.strategy, choice.options, choice.missing) == ("salted", SaltOptions(period=7), False)
    declined = routed(known, passages=3)
    assert choose(candidates(declined), declined).strategy == "lookup_tree"
    unknown = routed(known, common=("aggregate",))
    assert candidates(unknown)[0].missing and candidates(unknown)[0].strategy == "lookup_tree"
    with pytest.raises(RequestError, match="forbids"):
        candidates(routed(known, privacy="local-only"))
    with pytest.raises(RequestError, match="no logprobs"):
        candidates(routed(known, top_logprobs=0))


# ---- two nodes ------------------------------------------------------------------------------------------------------
@pytest.mark.anyio
@pytest.mark.parametrize("side", SIDES)
async def test_two_nodes_write_with_it_over_a_link(side: Side) -> None:
    """Also where the peer refuses: the front's own text, and the answer says that the peer was lost."""
    async with nodes() as (bench, _):
        node = bench.cloud if side == "cloud" else bench.device
        plain, _ = await collect(await node.prepare(changed(REQUEST, strategy="autoregressive")))
        asked = changed(REQUEST, strategy="salted", options={"period": 2})
        text, done = await collect(await node.prepare(asked))
        assert text == plain and (done.strategy, done.degraded) == ("salted", None)
        assert done.stats["echoes"] > 0 and done.stats["sent_salt_bytes"] > 0
        refused, done = await collect(await node.prepare(changed(asked, options={"period": 40})))
        assert refused == plain and (done.strategy, done.degraded) == ("salted", f"{other(side)}_refused")
        assert done.stats["echoes"] == 0
