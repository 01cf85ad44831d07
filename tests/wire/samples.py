"""Sample messages, one of every kind. Their signatures are no ones."""

from __future__ import annotations

import numpy as np

from paceline.core.sampling.dist import Dist
from paceline.wire.codec import encode_head, encode_options, encode_part
from paceline.wire.messages import (
    KEY_BYTES,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    VERSION,
    AggregateOptions,
    Approximate,
    Challenge,
    ChatMessage,
    CloseSession,
    DetailRequest,
    Drafts,
    Drain,
    EvidenceWeight,
    Handover,
    Hello,
    KeyKept,
    Message,
    NewKey,
    OpenSession,
    Ping,
    Pong,
    Proof,
    RenewKey,
    RetrievedPassage,
    RetrievedPassages,
    Sampling,
    SentConstraint,
    SentThinking,
    SpeedReport,
    SyncState,
    Targets,
    Welcome,
    WrittenText,
)
from paceline.wire.payloads import EncodedNodes, pack_nodes
from tests.wire.identities import CLOUD, DEVICE

SIGNATURE = bytes(SIGNATURE_BYTES)
KEY = bytes(KEY_BYTES)
HELLO = Hello(version=VERSION, device="laptop", nonce=bytes(NONCE_BYTES))
CHALLENGE = Challenge(version=VERSION, name="", nonce=bytes(NONCE_BYTES), signature=SIGNATURE)
PROOF = Proof(introduction=encode_part(DEVICE), signatures=[SIGNATURE])
WELCOME = Welcome(introduction=encode_part(CLOUD), key=KEY, signature=SIGNATURE)
SAMPLING = Sampling(
    temperature=1.0,
    top_p=0.9,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=[(7, -1.5)],
    seed=-3,
    repetition_penalty=1.25,
)


def opening(session: int) -> OpenSession:
    return OpenSession(
        session=session,
        strategy="aggregate",
        messages=[ChatMessage(role="user", content="Who keeps the key?")],
        query="Who keeps the key?",
        sampling=SAMPLING,
        max_tokens=64,
        top_k_documents=2,
        privacy="document-private",
        options=encode_options(AggregateOptions(aggregator="mixture")),
        targets=[],
        epoch=0,
        constraint=SentConstraint(
            "json_schema", '{"type": "object"}', 3, True, [7], SentThinking("<think>", "</think>", begun=True, budget=9)
        ),
        asker="notebook",
    )


def closing(session: int, reason: str = "stop") -> CloseSession:
    return CloseSession(session=session, reason=reason)


def draft(session: int) -> Drafts:
    """A chain of two nodes after four targets, with their distributions."""
    dist = Dist(np.array([1, 5, 9], dtype=np.int32), np.array([0.5, 0.25, 0.125]), 0.125)
    nodes = pack_nodes(EncodedNodes(4, 0, 7, (-1, 7), (0, 5), None))
    return Drafts(session=session, epoch=2, nodes=nodes, dists=[encode_head(dist, precise=False)] * 2)


def choice(session: int) -> Drafts:
    """The same chain, with the sender's choice after each node."""
    return Drafts(session=session, epoch=2, nodes=pack_nodes(EncodedNodes(4, 0, 7, (-1, 7), (0, 5), (5, 9))), dists=[])


def weight(session: int) -> EvidenceWeight:
    return EvidenceWeight(session=session, epoch=2, log_weight=-0.5)


def targets(session: int) -> Targets:
    return Targets(session=session, epoch=1, start=4, tokens=[5, 8], lanes=b"\x01\x02")


def have(session: int) -> SyncState:
    return SyncState(session=session, epoch=1, turn=2, targets=6, waits=True)


def found(session: int) -> RetrievedPassages:
    passage = RetrievedPassage(document="keys.md", text="Ana keeps it.", score=0.75, place="page 2", chunk=7)
    return RetrievedPassages(session=session, passages=[passage])


def written(session: int) -> WrittenText:
    return WrittenText(session=session, text="Where is the key?", tokens=5)


def every_message(session: int = 1) -> list[Message]:
    return [
        HELLO,
        CHALLENGE,
        PROOF,
        WELCOME,
        RenewKey(),
        NewKey(key=KEY, signature=SIGNATURE, possession=SIGNATURE),
        KeyKept(signature=SIGNATURE),
        Ping(sent_at=1.5),
        Pong(sent_at=1.5, held_s=0.0),
        Drain(),
        opening(session),
        closing(session),
        found(session),
        Approximate(session),
        written(session),
        draft(session),
        choice(session),
        weight(session),
        EvidenceWeight(session=session, epoch=2, log_weight=None),
        DetailRequest(session=session, epoch=2, node=7, level=1),
        targets(session),
        Handover(session=session, epoch=1, turn=3, start=6),
        SpeedReport(session=session, epoch=1, decode_s=0.06, row_s=0.0005),
        have(session),
    ]
