"""Messages to bytes and back, with a limit on everything. Knows neither sockets nor the order in which messages come.

What `decode` returns has been checked as far as one message can be: types and ranges (messages.py), finite floats,
fields that must agree with each other, distributions, token ids within the vocabulary. A machine may rely on that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from paceline.core.sampling.constraint import Constraint
from paceline.core.sampling.sampler import SamplingParams
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.wire import messages
from paceline.wire.close_codes import CloseCode
from paceline.wire.dist_codec import decode_dist, encode_dist, quantize
from paceline.wire.messages import (
    Drafts,
    EvidenceWeight,
    Hello,
    Message,
    OpenSession,
    Ping,
    Pong,
    RetrievedPassages,
    Sampling,
    SpeedReport,
    Targets,
)
from paceline.wire.tree_codec import unpack_nodes

__all__ = [
    "MAX_CONTROL_BYTES",
    "MAX_FRAME_BYTES",
    "constraint_from_wire",
    "constraint_to_wire",
    "decode",
    "decode_dist",
    "encode",
    "encode_dist",
    "peek_version",
    "quantize",
    "sampling_from_wire",
    "sampling_to_wire",
]

MAX_FRAME_BYTES = 1 << 20
MAX_CONTROL_BYTES = 1 << 16
DATA = (OpenSession, Drafts, Targets, RetrievedPassages)  # may fill a frame; everything else is control
_LAST_TOKEN = 2**31 - 1
_LANES = bytes(range(3))

_INDEX = re.compile(r"\$\[(\d+)\]")
_FIELDS = {struct.__struct_config__.tag: struct.__struct_fields__ for struct in get_args(Message)}

_NO_LAWS = bytes([0x90 + len(Drafts.__struct_fields__)])  # MessagePack's head of an array without its last field

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_array_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any])


def encode(message: Message) -> bytes:
    """One frame. Raises LocalProtocolError when it is larger than a peer may accept, or holds text that is not text."""
    try:
        data = _encoder.encode(message)
        if isinstance(message, Drafts) and not message.dists:
            data = _NO_LAWS + data[1:-1]  # of what is sent for every token no byte is spent on an empty list
    except (UnicodeEncodeError, OverflowError) as error:
        raise LocalProtocolError(f"a {_tag(message)} message cannot be encoded: {error}") from error
    limit = _limit(message)
    if len(data) > limit:
        raise LocalProtocolError(f"a {_tag(message)} message has {len(data)} bytes, more than {limit}")
    return data


def decode(data: bytes, *, vocab_size: int | None = None) -> Message:
    """One frame. Raises RemoteProtocolError, and nothing else, with the close code and the path of the fault."""
    if len(data) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame has {len(data)} bytes", close_code=CloseCode.TOO_LARGE)
    try:
        message = _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _bad(_with_field_name(str(error), data)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(str(error)) from error
    if len(data) > _limit(message):
        what = f"a {_tag(message)} message has {len(data)} bytes"
        raise RemoteProtocolError(what, close_code=CloseCode.TOO_LARGE)
    _check(message, vocab_size)
    return message


def peek_version(data: bytes) -> int | None:
    """The version a hello of any version states, so that its sender is told just that. None if it is no hello."""
    fields = _array(data) if len(data) <= MAX_CONTROL_BYTES else []
    if len(fields) < 2 or fields[0] != "hello" or not isinstance(fields[1], int):
        return None
    return fields[1]


def sampling_to_wire(params: SamplingParams) -> Sampling:
    """Raises LocalProtocolError for values that a peer would refuse."""
    sampling = Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=sorted(params.logit_bias.items()),
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
    )
    try:
        return msgspec.convert(msgspec.to_builtins(sampling), Sampling)
    except msgspec.ValidationError as error:
        what = _INDEX.sub(lambda match: f"$.{Sampling.__struct_fields__[int(match[1])]}", str(error))
        raise LocalProtocolError(f"sampling parameters cannot be sent: {what}") from error


def sampling_from_wire(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
    )


def constraint_to_wire(constraint: Constraint | None) -> messages.Constraint | None:
    return None if constraint is None else messages.Constraint(constraint.kind, constraint.text)


def constraint_from_wire(constraint: messages.Constraint) -> Constraint:
    return Constraint(constraint.kind, constraint.text)


def _array(data: bytes) -> list[Any]:
    try:
        return _array_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []


def _with_field_name(what: str, data: bytes) -> str:
    """msgspec names a field of an array by its place, the tag being the first."""
    tag = next(iter(_array(data)), None)
    names = ("tag", *_FIELDS[tag]) if isinstance(tag, str) and tag in _FIELDS else ("tag",)
    return _INDEX.sub(lambda match: f"$.{names[int(match[1])]}" if int(match[1]) < len(names) else match[0], what)


def _check(message: Message, vocab_size: int | None) -> None:
    match message:
        case OpenSession(sampling=sampling):
            biased = [token for token, _ in sampling.logit_bias]
            if len(set(biased)) != len(biased):
                raise _bad("logit_bias names a token twice - at `$.sampling.logit_bias`")
            _finite("sampling", *_floats(sampling), *(bias for _, bias in sampling.logit_bias))
            _tokens("targets", message.targets, 0, vocab_size)
            _tokens("sampling.logit_bias", biased, 0, vocab_size)
        case Drafts():
            nodes = unpack_nodes(message.nodes, vocab_size)
            expected = len(nodes.tokens) if nodes.choices is None else 0
            if len(message.dists) != expected:
                raise _bad(f"{len(message.dists)} laws where there must be {expected} - at `$.laws`")
            # The laws are unpacked once, where they are used: a bad one is worth nothing, and harms nobody.
        case EvidenceWeight(log_weight=log_weight):
            if log_weight is not None:
                _finite("log_weight", log_weight)
        case SpeedReport():
            _finite("decode_s", message.decode_s, message.row_s)
        case Targets():
            if message.lanes and len(message.lanes) != len(message.tokens):
                raise _bad(f"{len(message.lanes)} lanes for {len(message.tokens)} tokens - at `$.lanes`")
            if message.lanes.strip(_LANES):
                raise _bad("a lane is neither 0, 1 nor 2 - at `$.lanes`")
            _tokens("tokens", message.tokens, message.start, vocab_size)
        case RetrievedPassages():
            _finite("passages", *(passage.score for passage in message.passages))
        case Ping() | Pong():
            _finite("sent_at", *_floats(message))
        case Hello():
            if not message.device:
                raise _bad("a device has no name - at `$.device`")
        case _:
            pass


def _tokens(path: str, tokens: list[int], start: int, vocab_size: int | None) -> None:
    if start + len(tokens) > _LAST_TOKEN:
        raise _bad(f"positions beyond {_LAST_TOKEN} - at `$.{path}`")
    if vocab_size is not None and tokens and max(tokens) >= vocab_size:
        raise _bad(f"a token id outside the vocabulary of {vocab_size} - at `$.{path}`")


def _floats(struct: Sampling | Ping | Pong) -> Iterable[float]:
    return [value for value in msgspec.structs.astuple(struct) if isinstance(value, float)]


def _finite(path: str, *values: float) -> None:
    if not all(map(math.isfinite, values)):
        raise _bad(f"a number that is not finite - at `$.{path}`")


def _limit(message: Message) -> int:
    return MAX_FRAME_BYTES if isinstance(message, DATA) else MAX_CONTROL_BYTES


def _tag(message: Message) -> str:
    return str(message.__struct_config__.tag)


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
