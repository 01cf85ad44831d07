"""Messages to bytes and back, with a limit on every size. Knows neither sockets nor the order of messages.

A decoded message has been checked on its own: types and ranges (messages.py), finite floats, consistency between
fields, token ids within the vocabulary. Machines may rely on that. `OpenSession.options` is decoded by
`decode_options`, once the strategy is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import astuple
from functools import reduce
from operator import or_
from typing import Any, TypeVar, cast

import msgspec

from paceline.core.sampling.sampler import Constraint, SamplingParams, Thinking, usable_temperature
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.wire import messages, payloads
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import (
    CONTROL_MESSAGES,
    MAX_CONTROL_BYTES,
    MAX_FRAME_BYTES,
    STRATEGY_MESSAGES,
    Frame,
    Introduction,
    Message,
    Options,
    Sampling,
    SentPart,
    SessionMessage,
)

O = TypeVar("O", bound=Options)  # noqa: E741
P = TypeVar("P", bound=SentPart)
F = TypeVar("F", bound=Frame)

_INDEX = re.compile(r"\$\[(\d+)\]")

_encoder = msgspec.msgpack.Encoder()
_array_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any])


class _Registry:
    """Structs of the messages that can be decoded, by tag. Complete once all strategies are registered, before a link
    is up."""

    def __init__(self) -> None:
        self._structs: dict[str, type[Frame]] = {}
        self.add(*CONTROL_MESSAGES, *STRATEGY_MESSAGES)

    def add(self, *structs: type[Frame]) -> None:
        for struct in structs:
            tag = str(struct.__struct_config__.tag)
            if self._structs.setdefault(tag, struct) is not struct:
                raise ValueError(f"the tag {tag!r} is {self._structs[tag].__name__}'s")
        self._rebuild()

    def remove(self, *structs: type[Frame]) -> None:
        for struct in structs:
            del self._structs[str(struct.__struct_config__.tag)]
        self._rebuild()

    @property
    def structs(self) -> tuple[type[Frame], ...]:
        return tuple(self._structs.values())

    def decode_compact(self, data: bytes) -> SessionMessage:
        """Decode the short form. Raises RemoteProtocolError."""
        code = payloads.code_of(data)
        kind = None if code is None else self._compact.get(code)
        if kind is None:
            raise _bad(f"no message has the code {code}")
        session, epoch, numbers, rest = payloads.unpack(data, kind.compact_numbers)
        try:
            fields = kind.from_compact(numbers, rest)
            return msgspec.convert([kind.__struct_config__.tag, session, epoch, *fields], kind)
        except msgspec.ValidationError as error:
            raise _bad(_with_field_names(str(error), ("tag", *kind.__struct_fields__))) from error

    def _rebuild(self) -> None:
        kinds = reduce(or_, self._structs.values())
        session_kinds = [kind for kind in self._structs.values() if issubclass(kind, SessionMessage)]
        self._compact = {kind.compact_code: kind for kind in session_kinds if kind.compact_code is not None}
        self.decoder = cast("msgspec.msgpack.Decoder[Message]", msgspec.msgpack.Decoder(kinds))

    def fields(self, tag: object) -> tuple[str, ...]:
        """Field names of the message with this tag; none for an unknown tag."""
        return self._structs[tag].__struct_fields__ if isinstance(tag, str) and tag in self._structs else ()


_registry = _Registry()


def register(*structs: type[SessionMessage]) -> None:
    """Add a strategy's messages to those the link decodes. Raises ValueError for a tag that is taken."""
    _registry.add(*structs)


def registered() -> tuple[type[Frame], ...]:
    """Structs of all messages that the link decodes now."""
    return _registry.structs


def unregister(*structs: type[SessionMessage]) -> None:
    """Undo `register`."""
    _registry.remove(*structs)


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
    if len(data) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame has {len(data)} bytes", close_code=CloseCode.TOO_LARGE)
    decoder = _registry.decode_compact if payloads.code_of(data) else _registry.decoder.decode
    return decode_with(decoder, data, vocab_size)


def decode_with(decoder: Callable[[bytes], F], data: bytes, vocab_size: int | None = None) -> F:
    """Decode one frame of the messages that this decoder knows. Raises as `decode` does."""
    try:
        message = decoder(data)
    except msgspec.ValidationError as error:
        raise _bad(_with_field_name(str(error), data)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(str(error)) from error
    if len(data) > message.max_bytes:
        what = f"a {_tag(message)} message has {len(data)} bytes"
        raise RemoteProtocolError(what, close_code=CloseCode.TOO_LARGE)
    if (fault := message.fault(vocab_size)) is not None:
        raise _bad(fault)
    return message


def _compact(message: Frame) -> bytes | None:
    """The short form of a message that has one."""
    if not isinstance(message, SessionMessage) or message.compact_code is None:
        return None
    parts = message.to_compact()
    return None if parts is None else payloads.pack(message.compact_code, message.session, message.epoch, *parts)


def peek_version(data: bytes) -> int | None:
    """Protocol version in a hello of any version, for a precise refusal. None for any other frame."""
    fields = _array(data) if len(data) <= MAX_CONTROL_BYTES else []
    if len(fields) < 2 or fields[0] != "hello" or not isinstance(fields[1], int):
        return None
    return fields[1]


def encode_introduction(introduction: Introduction) -> bytes:
    """Encode the field `introduction` of Proof and Welcome. These bytes are signed."""
    return _encoder.encode(introduction)


def decode_introduction(data: bytes) -> Introduction:
    """Decode a peer's introduction. Raises RemoteProtocolError with the path of the fault."""
    return _decode_part(data, Introduction)


def sampling_to_wire(params: SamplingParams) -> Sampling:
    """Encode sampling parameters. Raises LocalProtocolError for values that a peer would refuse."""
    values = {name: getattr(params, name) for name in Sampling.__struct_fields__}
    values["logit_bias"] = sorted(params.logit_bias.items())
    try:
        return msgspec.convert(list(values.values()), Sampling)
    except msgspec.ValidationError as error:
        what = _with_field_names(str(error), Sampling.__struct_fields__)
        raise LocalProtocolError(f"sampling parameters cannot be sent: {what}") from error


def sampling_from_wire(sampling: Sampling) -> SamplingParams:
    temperature, bias = usable_temperature(sampling.temperature), dict(sampling.logit_bias)
    return SamplingParams(**msgspec.structs.asdict(sampling) | {"temperature": temperature, "logit_bias": bias})


def encode_options(options: Options) -> msgspec.Raw:
    """Encode the field `OpenSession.options`. Raises LocalProtocolError when a peer would refuse it."""
    data = _encoder.encode(options)
    try:
        decode_options(msgspec.Raw(data), type(options))
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"options cannot be sent: {error}") from error
    return msgspec.Raw(data)


def decode_options(data: msgspec.Raw, kind: type[O]) -> O:
    """Decode the options of an opening, a struct of `kind`. Raises RemoteProtocolError with the path of the fault."""
    return _decode_part(data, kind)


def constraint_to_wire(constraint: Constraint | None) -> messages.SentConstraint | None:
    if constraint is None:
        return None
    sent = {name: getattr(constraint, name) for name in messages.SentConstraint.__struct_fields__}
    thinking = None if constraint.thinking is None else messages.SentThinking(*astuple(constraint.thinking))
    return messages.SentConstraint(**sent | {"stop_ids": list(constraint.stop_ids), "thinking": thinking})


def constraint_from_wire(constraint: messages.SentConstraint) -> Constraint:
    sent = constraint.thinking
    thinking = None if sent is None else Thinking(*msgspec.structs.astuple(sent))
    fields = msgspec.structs.asdict(constraint)
    return Constraint(**fields | {"stop_ids": tuple(constraint.stop_ids), "thinking": thinking})


def _decode_part(data: bytes | msgspec.Raw, kind: type[P]) -> P:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _bad(_with_field_names(str(error), kind.__struct_fields__)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(str(error)) from error


def _array(data: bytes) -> list[Any]:
    try:
        return _array_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []


def _with_field_name(what: str, data: bytes) -> str:
    """Replace msgspec's array index in a path by the field name; index 0 is the tag."""
    return _with_field_names(what, ("tag", *_registry.fields(next(iter(_array(data)), None))))


def _with_field_names(what: str, names: tuple[str, ...]) -> str:
    return _INDEX.sub(lambda match: f"$.{names[int(match[1])]}" if int(match[1]) < len(names) else match[0], what)


def _tag(message: Frame) -> str:
    return str(message.__struct_config__.tag)


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
