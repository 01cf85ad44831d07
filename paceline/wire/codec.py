"""Messages to bytes and back, with a limit on every size, and the heads of distributions that they carry. Knows neither
sockets nor the order of messages.

A decoded message has been checked on its own: types and ranges (messages.py), finite floats, consistency between
fields, token ids within the vocabulary. Machines may rely on that. `OpenSession.options` is decoded by
`decode_part`, once the strategy is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from paceline.core.sampling.dist import ONE, SLACK, Dist, IdArray, check, from_codes, quantized_codes
from paceline.core.sampling.sampler import Constraint, SamplingParams, usable_temperature
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.wire import messages, payloads
from paceline.wire.close_codes import CloseCode, remote_fault
from paceline.wire.messages import DistPayload, Frame, Message, Options, SentPart, SessionMessage
from paceline.wire.payloads import from_varints, to_varints

P = TypeVar("P", bound=SentPart)
F = TypeVar("F", bound=Frame)

_INDEX = re.compile(r"\$\[(\d+)\]")


def _plain(value: object) -> object:
    """Arrays as bytes, little-endian, of truth values a bit each; numpy's numbers as Python's."""
    match value:
        case np.ndarray(dtype=np.dtypes.BoolDType()):
            return np.packbits(value, bitorder="little").tobytes()
        case np.ndarray():
            return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        case np.generic():
            return value.item()
    raise TypeError(f"a {type(value).__name__} is not sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_array_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any])


class _Known:
    """Structs of the messages that can be decoded. Complete once all strategies are registered, before a link is up."""

    def __init__(self, structs: dict[str, type[Frame]]) -> None:
        """structs: by tag."""
        self.structs = structs
        kinds = [kind for kind in structs.values() if issubclass(kind, SessionMessage)]
        self.compact = {kind.compact_code: kind for kind in kinds if kind.compact_code is not None}
        decoder = msgspec.msgpack.Decoder(reduce(or_, structs.values()))
        self.decoder = cast("msgspec.msgpack.Decoder[Message]", decoder)


_known = _Known(
    {str(kind.__struct_config__.tag): kind for kind in (*messages.CONTROL_MESSAGES, *messages.STRATEGY_MESSAGES)}
)


def register(*structs: type[SessionMessage]) -> None:
    """Add a strategy's messages to those the link decodes. Raises ValueError for a tag that is taken."""
    global _known
    known = dict(_known.structs)
    for struct in structs:
        tag = str(struct.__struct_config__.tag)
        if known.setdefault(tag, struct) is not struct:
            raise ValueError(f"the tag {tag!r} is {known[tag].__name__}'s")
    _known = _Known(known)


def encode(message: Frame) -> bytes:
    """Encode one frame. Raises LocalProtocolError for one above its size limit or with text that is not Unicode."""
    try:
        data = _compact(message) or _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise LocalProtocolError(f"a {_tag(message)} message cannot be encoded: {error}") from error
    if len(data) > message.max_bytes:
        raise LocalProtocolError(f"a {_tag(message)} message has {len(data)} bytes, more than {message.max_bytes}")
    return data


def decode(data: bytes, *, vocab_size: int | None = None) -> Message:
    """Decode one frame. Raises only RemoteProtocolError, with the close code and the path of the fault."""
    if len(data) > messages.MAX_FRAME_BYTES:
        raise remote_fault(f"a frame has {len(data)} bytes", CloseCode.TOO_LARGE)
    decoder = _decode_compact if payloads.code_of(data) else _known.decoder.decode
    return decode_with(decoder, data, vocab_size)


def decode_with(decoder: Callable[[bytes], F], data: bytes, vocab_size: int | None = None) -> F:
    """Decode one frame of the messages that this decoder knows. Raises as `decode` does."""
    try:
        message = decoder(data)
    except msgspec.ValidationError as error:
        raise remote_fault(_with_field_name(str(error), data)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise remote_fault(str(error)) from error
    if len(data) > message.max_bytes:
        raise remote_fault(f"a {_tag(message)} message has {len(data)} bytes", CloseCode.TOO_LARGE)
    if (fault := message.fault(vocab_size)) is not None:
        raise remote_fault(fault)
    return message


def _compact(message: Frame) -> bytes | None:
    """The short form of a message that has one."""
    if not isinstance(message, SessionMessage) or message.compact_code is None:
        return None
    parts = message.to_compact()
    return None if parts is None else payloads.pack(message.compact_code, message.session, message.epoch, *parts)


def _decode_compact(data: bytes) -> SessionMessage:
    code = payloads.code_of(data)
    kind = None if code is None else _known.compact.get(code)
    if kind is None:
        raise remote_fault(f"no message has the code {code}")
    session, epoch, numbers, rest = payloads.unpack(data, kind.compact_numbers)
    try:
        fields = kind.from_compact(numbers, rest)
        return msgspec.convert([kind.__struct_config__.tag, session, epoch, *fields], kind)
    except msgspec.ValidationError as error:
        raise remote_fault(_with_field_names(str(error), ("tag", *kind.__struct_fields__))) from error


def peek_version(data: bytes) -> int | None:
    """Protocol version in a hello of any version, for a precise refusal. None for any other frame."""
    fields = _array(data) if len(data) <= messages.MAX_CONTROL_BYTES else []
    if len(fields) < 2 or fields[0] != "hello" or not isinstance(fields[1], int):
        return None
    return fields[1]


def encode_part(part: SentPart) -> bytes:
    """Encode what a message carries as bytes, as an introduction, which is signed in this form."""
    return _encoder.encode(part)


def decode_part(data: bytes | msgspec.Raw, kind: type[P]) -> P:
    """Decode what a message carries as bytes, or the options of an opening. Raises RemoteProtocolError with the path of
    the fault."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise remote_fault(_with_field_names(str(error), kind.__struct_fields__)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise remote_fault(str(error)) from error


def sampling_to_wire(params: SamplingParams) -> messages.Sampling:
    """Encode sampling parameters. Raises LocalProtocolError for values that a peer would refuse."""
    values = {name: getattr(params, name) for name in messages.Sampling.__struct_fields__}
    values["logit_bias"] = sorted(params.logit_bias.items())
    try:
        return msgspec.convert(list(values.values()), messages.Sampling)
    except msgspec.ValidationError as error:
        what = _with_field_names(str(error), messages.Sampling.__struct_fields__)
        raise LocalProtocolError(f"sampling parameters cannot be sent: {what}") from error


def sampling_from_wire(sampling: messages.Sampling) -> SamplingParams:
    temperature, bias = usable_temperature(sampling.temperature), dict(sampling.logit_bias)
    return SamplingParams(**msgspec.structs.asdict(sampling) | {"temperature": temperature, "logit_bias": bias})


def encode_options(options: Options) -> msgspec.Raw:
    """Encode the field `OpenSession.options`. Raises LocalProtocolError when a peer would refuse it."""
    data = _encoder.encode(options)
    try:
        decode_part(data, type(options))
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"options cannot be sent: {error}") from error
    return msgspec.Raw(data)


def constraint_to_wire(constraint: Constraint | None) -> messages.SentConstraint | None:
    """Raises LocalProtocolError for one that a peer would refuse."""
    if constraint is None:
        return None
    try:
        return msgspec.convert(constraint, messages.SentConstraint, from_attributes=True)
    except msgspec.ValidationError as error:
        raise LocalProtocolError(f"the constraint cannot be sent: {error}") from error


def constraint_from_wire(constraint: messages.SentConstraint) -> Constraint:
    return msgspec.convert(constraint, Constraint, from_attributes=True)


def _array(data: bytes) -> list[Any]:
    try:
        return _array_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []


def _with_field_name(what: str, data: bytes) -> str:
    """Replace msgspec's array index in a path by the field name; index 0 is the tag."""
    tag = next(iter(_array(data)), None)
    kind = _known.structs.get(tag) if isinstance(tag, str) else None
    return _with_field_names(what, ("tag", *(() if kind is None else kind.__struct_fields__)))


def _with_field_names(what: str, names: tuple[str, ...]) -> str:
    return _INDEX.sub(lambda match: f"$.{names[int(match[1])]}" if int(match[1]) < len(names) else match[0], what)


def _tag(message: Frame) -> str:
    return str(message.__struct_config__.tag)


# ---- heads of distributions in few bytes -----------------------------------------------------------------------------
# Decoded bit for bit as the sender has them: ids, and probabilities of the full distribution, not renormalised; the
# tail mass is 1 less their sum and is not sent. With 16 bits a probability, what is decoded equals
# `core.sampling.dist.quantize`; a precise one is float64, unchanged.
_CODE_BYTES, _PRECISE_BYTES = 2, 8


def encode_head(dist: Dist, precise: bool) -> DistPayload:
    """Encode; `precise`: in float64. Raises ValueError for an invalid one.

    With 16 bits, ids less likely than 2**-31 are dropped; the heads that aggregators make have none.
    """
    if precise:
        check(dist.probs)
        ids, probs = dist.ids, np.minimum(dist.probs, 1.0).astype("<f8").tobytes()
    else:
        ids, codes = quantized_codes(dist, 1.0, None)
        probs = codes.astype("<u2").tobytes()
    steps = np.diff(ids.astype(np.int64), prepend=-1) - 1
    return DistPayload(to_varints(steps.astype(np.uint64)), probs)


def decode_head(payload: DistPayload, vocab_size: int | None = None) -> Dist:
    """Decode. Raises RemoteProtocolError for anything `encode_head` cannot have written for that vocabulary size."""
    count = int(np.count_nonzero(np.frombuffer(payload.ids, dtype=np.uint8) < 128))
    if count and len(payload.probs) == _PRECISE_BYTES * count:
        probs = np.frombuffer(payload.probs, dtype="<f8").astype(np.float64)
        if not (probs.min() >= 0.0 and probs.max() <= 1.0 and float(probs.sum()) <= 1.0 + SLACK):  # also refuses NaN
            raise remote_fault("what should be a distribution is none")
        return Dist(_ids(payload.ids, count, vocab_size), probs, max(0.0, 1.0 - float(probs.sum())))
    if len(payload.probs) % _CODE_BYTES:
        raise remote_fault("probabilities end within a number")
    codes = np.frombuffer(payload.probs, dtype="<u2").astype(np.uint16)
    if len(codes) and codes.max() > ONE:
        raise remote_fault("a probability is above 1")
    dist = from_codes(_ids(payload.ids, len(codes), vocab_size), codes)
    if dist.tail < 0:
        raise remote_fault(f"a distribution has mass {1 - dist.tail}")
    return dist


def _ids(data: bytes, count: int, vocab_size: int | None) -> IdArray:
    steps = from_varints(data)
    if len(steps) != count:
        raise remote_fault(f"a distribution has {len(steps)} ids and {count} probabilities")
    ids = np.cumsum(steps + 1) - 1  # at most 2**20 steps, each below 2**35: no overflow
    if len(ids) and ids[-1] >= (2**31 if vocab_size is None else vocab_size):
        raise remote_fault("a distribution has a token id outside the vocabulary")
    return ids.astype(np.int32)
