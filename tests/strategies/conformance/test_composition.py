"""A new composition of parts that are there: the cloud writes and drafts by its own tables, the device listens.

As `draft_verify` without drafts of the device's, which needs no engine while its cloud is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.clock import StepClock
from paceline.strategies.base import Effect, Machine, MachineConfig, Sampled, Scored, Side
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.draft_verify.machine import draft_verify
from paceline.strategies.draft_verify.target_writer import TargetWriter
from paceline.strategies.joint import LANES, EarlyTargets, Joint, JointAnswer
from paceline.wire.messages import SessionMessage, Targets
from tests.strategies.cases import SAMPLINGS, Manner
from tests.strategies.conformance.laws import EVERY_FRONT, QUICK, check_flap, check_loss, check_return, check_text
from tests.strategies.conformance.worlds import IN_ORDER


class Listener(Joint):
    """The device: emits what the cloud writes, and goes on alone from there where the cloud is gone."""

    def __init__(self, config: MachineConfig) -> None:
        tree = PrefixTree(len(config.seat.targets))
        decoder = BranchDecoder(config.output, rescoring=config.options.rescoring)
        super().__init__(config, tree, decoder, JointAnswer(config, tree), StepClock())
        self._meet_peer()

    def _meet_peer(self) -> None:
        self._early = EarlyTargets()

    def _brings_on(self, message: SessionMessage) -> bool:
        return isinstance(message, Targets) and bool(message.tokens)

    def _received(self, message: SessionMessage) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(message, Targets):
            self._early.add(message, len(self._answer.targets))
        while not self._answer.ended and (ready := self._early.pop(len(self._answer.targets))) is not None:
            lanes = ready.lanes or bytes(len(ready.tokens))
            for at in range(len(self._answer.targets) - ready.start, len(ready.tokens)):
                effects += [] if self._answer.ended else self._append(ready.tokens[at], LANES[lanes[at]], None)
        return [*effects, *self._advance()]

    def _computed(self, event: Scored | Sampled, nodes: Sequence[PrefixNode]) -> list[Effect]:  # noqa: ARG002
        return self._advance() if nodes else []

    def _advance(self) -> list[Effect]:
        if not self._linked:
            return self._write_alone()
        return self._end() if self._answer.ended else []

    def _synchronise(self, *, progressed: bool) -> list[Effect]:  # noqa: ARG002  # a hook
        return []

    def stats(self) -> dict[str, float]:
        return {"alone": float(self._alone)}


def machine(config: MachineConfig) -> Machine:
    return Listener(config) if config.seat.side == "device" else TargetWriter(config)


STREAMED = replace(draft_verify, name="streamed", machine=machine)
TABLES = Manner(tables=True)


@EVERY_FRONT
def test_the_composition_keeps_the_laws(front: Side) -> None:
    for sampling in SAMPLINGS.values():
        check_text(STREAMED, TABLES, front, sampling, range(1), reorders=False)
    check_loss(STREAMED, TABLES, front, SAMPLINGS["sampled"], IN_ORDER)
    check_flap(STREAMED, TABLES, front, SAMPLINGS["sampled"], range(QUICK), reorders=False)
    check_return(STREAMED, TABLES, front, range(6), IN_ORDER)
