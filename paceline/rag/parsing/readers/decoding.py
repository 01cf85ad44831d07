"""Bytes of unknown character set to text. Line ends become LF."""

from __future__ import annotations

import codecs

from paceline.rag.parsing.kinds import EMPTY, MAX_TEXT_BYTES
from paceline.rag.parsing.readers.content import UnreadableError, too_long

_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# What text of before Unicode is written in, per region; more candidates make short texts ambiguous.
_LEGACY = ["cp1252", "cp1250", "cp1251", "koi8_r", "iso8859_2", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr"]
_SAMPLE = 4096  # bytes in which zeros tell of UTF-16 without a mark
_UNUSED = frozenset("\0\1\2\3\4\5\6\7\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1c\x1d\x1e\x1f")
_MAX_UNUSED = 0.01  # share of such control characters in a text
_BINARY = "looks like a binary file; convert it to text or PDF first"


def decode(data: bytes, declared: str = "") -> str:
    """The text, in the character set of its mark, else the declared one, else the likeliest.

    Raises UnreadableError for what is no text in any, is empty, or is too long.
    """
    if not data:
        raise UnreadableError(EMPTY, "invalid_file")
    if len(data) > 4 * MAX_TEXT_BYTES:  # in no character set is it shorter
        raise too_long()
    text = _decoded(data, declared)
    if _is_binary(text):
        raise UnreadableError(_BINARY)
    if len(text) > MAX_TEXT_BYTES or len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise too_long()
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UnreadableError(EMPTY)
    return text


def _decoded(data: bytes, declared: str) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError as error:
                raise UnreadableError(
                    f"is damaged: its first bytes mark it as {error.encoding}, which ends at byte {error.start}",
                    "invalid_file",
                ) from None
    for encoding in (_known(declared), _of_zeros(data[:_SAMPLE]), "utf-8"):
        if encoding:
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                continue
    if b"\0" in data:  # in none of the older character sets
        raise UnreadableError(_BINARY)
    return _guessed(data)


def _known(declared: str) -> str:
    """The codec of a declared character set; "" for an unknown one. As for browsers, Latin-1 means cp1252, and UTF-16
    is not believed, since the declaration itself could be read as ASCII.
    """
    try:
        name = codecs.lookup(declared).name if declared.isascii() and declared.isprintable() else ""
    except (LookupError, ValueError):
        return ""
    if name in ("iso8859-1", "ascii"):
        return "cp1252"
    return (
        name if name.startswith(("utf-8", "cp", "iso8859", "koi8", "shift", "euc", "gb", "big5", "mac", "tis")) else ""
    )


def _of_zeros(sample: bytes) -> str:
    """UTF-16 without a mark: text of most languages has a zero in every other byte."""
    zeros = (sample[0::2].count(0), sample[1::2].count(0))
    if sum(zeros) * 5 < len(sample) or min(zeros) * 10 > max(zeros):
        return ""
    return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"


def _guessed(data: bytes) -> str:
    from charset_normalizer import from_bytes

    matches = list(from_bytes(data, cp_isolation=_LEGACY))
    if not matches:
        raise UnreadableError(_BINARY)
    best = matches[0]
    for match in matches:  # among equals, the character set of western Windows, which is by far the most frequent
        if match.encoding == "cp1252" and match.chaos <= best.chaos and match.coherence >= best.coherence:
            best = match
    return str(best)


def _is_binary(text: str) -> bool:
    if "\0" in text:
        return True
    return sum(map(text.count, _UNUSED)) > _MAX_UNUSED * len(text)
