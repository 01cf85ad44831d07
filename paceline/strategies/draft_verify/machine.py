"""`draft_verify` (GELATO): the device drafts, the cloud verifies, and the text is the cloud model's own.

With the verifier *agreement* a target is a function of the seed and the prefix alone, sampled from the cloud's
distribution: never of drafts, timing or message order. So the cloud verifies drafts from look-up tables of its own
beside the device's. With the others it is drawn from that distribution, and depends on the drafts. What the device
drafts from, its own model over messages that the cloud knows, holds nothing private.
"""

from __future__ import annotations

from paceline.strategies.base import JOINT_LEVELS, Machine, MachineConfig, Strategy
from paceline.strategies.draft_verify.drafter import Drafter
from paceline.strategies.draft_verify.options import accepts, check, choose
from paceline.strategies.draft_verify.target_writer import TargetWriter
from paceline.wire.messages import SyncState, Targets
from paceline.wire.verify_messages import VERIFY_MESSAGES, VerifyOptions


def machine(config: MachineConfig) -> Machine:
    return Drafter(config) if config.seat.side == "device" else TargetWriter(config)


draft_verify = Strategy(
    name="draft_verify",
    machine=machine,
    participants="both sides",
    text_of="cloud",
    joins_with_documents=("cloud",),  # a device would draft from private ones
    options=VerifyOptions,
    messages=(*VERIFY_MESSAGES, Targets, SyncState),
    privacy_levels=JOINT_LEVELS,
    check=check,
    choose=choose,
    accepts=accepts,
)
