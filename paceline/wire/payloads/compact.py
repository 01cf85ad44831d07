"""Short form of a message in place of its MessagePack array, for one that is sent for every few tokens.

A first byte below 0x80, with which no such array begins, then LEB128 numbers in their shortest form, then the last
field, bytes, to the end of the frame. The first byte holds the message's `compact_code`, doubled twice; bit 0 says that
the epoch follows the session, bit 1 that the last number follows the others; where they do not, they are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads.varints import MAX_NUMBER, read_number, write_number

FIRST_OF_ARRAY = 0x80  # least first byte of a frame in MessagePack
_EPOCH, _LAST = 1, 2


def pack(code: int, session: int, epoch: int, numbers: Sequence[int], rest: bytes) -> bytes | None:
    """The short form; None where a number is too large for it."""
    if max(session, epoch, *numbers) >= MAX_NUMBER:
        return None
    others, last = numbers[:-1], numbers[-1] if numbers else 0
    flags = (_EPOCH if epoch else 0) | (_LAST if last else 0)
    present = [session, *([epoch] if epoch else []), *others, *([last] if last else [])]
    return bytes([code << 2 | flags]) + b"".join(map(write_number, present)) + rest


def code_of(data: bytes) -> int | None:
    """Code of a frame in the short form; None for any other frame."""
    return data[0] >> 2 if data and data[0] < FIRST_OF_ARRAY else None


def unpack(data: bytes, num_numbers: int) -> tuple[int, int, list[int], bytes]:
    """Session, epoch, so many numbers, and the last field. Raises RemoteProtocolError for what `pack` does not write;
    ranges of fields are not checked."""
    flags, at = data[0], 1
    if flags & _LAST and not num_numbers:
        raise RemoteProtocolError("it has no last number", close_code=CloseCode.BAD_FRAME)
    last = [bool(flags & _LAST)] if num_numbers else []
    present = [True, bool(flags & _EPOCH), *[True] * (num_numbers - 1), *last]
    found: list[int] = []
    for is_there in present:
        value = 0
        if is_there:
            value, at = read_number(data, at)
        found.append(value)
    if (flags & _EPOCH and not found[1]) or (flags & _LAST and not found[-1]):
        raise RemoteProtocolError("a number that is 0 is written", close_code=CloseCode.BAD_FRAME)
    session, epoch, *numbers = found
    return session, epoch, numbers, data[at:]
