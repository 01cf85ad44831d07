"""Numbers packed bit by bit, lowest bit first, for messages whose numbers are smaller than a byte."""

from __future__ import annotations

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode

_MAX_BITS = 35  # of a number in groups


class BitWriter:
    """Appends numbers. `to_bytes` fills the last byte with zeros."""

    def __init__(self) -> None:
        self._value = self._length = 0

    def bits(self, value: int, width: int) -> None:
        """A number of a width that the reader knows."""
        self._value |= value << self._length
        self._length += width

    def number(self, value: int, group: int) -> None:
        """A number of any size below 2**35: so many bits a group, lowest first, and a bit that says whether another
        group follows."""
        while value >> group:
            self.bits(value & (1 << group) - 1 | 1 << group, group + 1)
            value >>= group
        self.bits(value, group + 1)

    def to_bytes(self) -> bytes:
        return self._value.to_bytes((self._length + 7) // 8, "little")


class BitReader:
    """Reads what `BitWriter` wrote. Raises RemoteProtocolError where bits are missing; not handled: numbers with more
    groups than they need, and what is left at the end, both of which show when the same is written again."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def bits(self, width: int) -> int:
        begin, end = self._at, self._at + width
        if end > 8 * len(self._data):
            raise RemoteProtocolError("it ends within a number", close_code=CloseCode.BAD_FRAME)
        self._at = end
        around = int.from_bytes(self._data[begin >> 3 : (end + 7) >> 3], "little")
        return around >> (begin & 7) & (1 << width) - 1

    def number(self, group: int) -> int:
        value = 0
        for place in range(0, _MAX_BITS, group):
            read = self.bits(group + 1)
            value |= (read & (1 << group) - 1) << place
            if not read >> group:
                return value
        raise RemoteProtocolError("a number is too large", close_code=CloseCode.BAD_FRAME)
