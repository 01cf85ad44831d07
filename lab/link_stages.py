"""The part of openapi/link.md about the links of a model in stages: its prose, and which messages it lists."""

from __future__ import annotations

import msgspec

from paceline.wire.effects import DOMAIN
from paceline.wire.stages import messages, sampling
from paceline.wire.stages.messages import MAX_MESSAGE_BYTES, MAX_ROWS, STAGE_VERSION
from paceline.wire.stages.pipe import (
    CHALLENGE,
    CHUNK_BYTES,
    LENGTH_BYTES,
    MAX_BULK_BYTES,
    MAX_WAITING,
    PROOF,
    WINDOW_BYTES,
)

SECTIONS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "Handshake, on every connection": (
        messages.StageHello,
        messages.StageChallenge,
        messages.StageProof,
        messages.Refused,
    ),
    "From the head": (
        messages.Describe,
        messages.LoadSpan,
        messages.Assign,
        messages.RunBatch,
        messages.PruneRows,
        messages.TruncateRows,
        messages.ForkRows,
        messages.ReleaseRows,
        messages.ExportRows,
        messages.ImportRows,
        messages.CheckRows,
        messages.Forget,
        messages.FetchScores,
        sampling.SampleAhead,
        sampling.SampleRows,
        messages.StagePing,
    ),
    "From a stage to the head": (
        messages.About,
        messages.RequestDone,
        messages.RequestFailed,
        messages.StageHave,
        messages.NeighbourLost,
        sampling.BatchDone,
        sampling.SampledRows,
    ),
    "Headers of bulk messages": (messages.HiddenRows, messages.KvRows, messages.ScoreRows),
    "Parts of these messages": (
        messages.StageCost,
        messages.SegmentRows,
        sampling.SparseDist,
        sampling.WantedRow,
        sampling.HeadRow,
        sampling.SampledToken,
        sampling.MixtureRows,
        sampling.Wanted,
    ),
}

INTRODUCTION = f"""
    Between the head of a pipeline and its stages, and from stage to stage: TCP with TLS 1.3, version {STAGE_VERSION}.
    The certificate is one that the stage has made for itself; who the ends are is proved by Ed25519 keys, in the
    handshake. What is signed has the encoding of [Identity](#identity), `{DOMAIN.decode()}` and the link's version
    included. `challenge`, of the stage, has the purpose `{CHALLENGE}` and the parts SHA-256 of the stage's certificate,
    frame of `hello`, `name`, `nonce`. `proof`, of whoever has dialled, has the purpose `{PROOF}` and the parts SHA-256
    of the certificate that it was shown, frame of `hello`, frame of `challenge`. A stage answers `answered` or
    `refused` to `proof`.

    A frame is the length of the rest in {LENGTH_BYTES} bytes, big-endian, a byte of its kind, and its content. Kind 0
    is a message, encoded as on the other link, of at most {MAX_MESSAGE_BYTES} bytes. Kind 1 begins a bulk message: the
    number of its bytes in 8, big-endian, at most {MAX_BULK_BYTES}, and its header, encoded as a message is. Kind 2 is a
    chunk of it; senders make chunks of {CHUNK_BYTES} bytes, and messages go between them. Kind 3 grants credit: a
    number of bytes in 8. A sender has {WINDOW_BYTES} bytes of credit at first, which chunks use up. A receiver holds at
    most {MAX_WAITING} bulk messages that nobody has taken. Whatever breaks this closes the connection, without a code.
    A batch has at most {MAX_ROWS} rows.

    `Bytes` of ids are int32, of probabilities and scores float64, little-endian. Hidden rows have the format that
    `assign` names, little-endian; keys and values the model's; scores float32.
"""
