"""E-mail (RFC 5322, MIME), one message or a mailbox: who wrote when to whom, the text, and what is attached: its text
if it is of a kind that is read, else its name.

Not handled: signatures and encrypted bodies, which are named as what is attached.
"""

from __future__ import annotations

import re
from email import message_from_bytes
from email.message import Message
from email.policy import default
from pathlib import PurePath

from paceline.rag.parsing.kinds import kind_of
from paceline.rag.parsing.readers import reader
from paceline.rag.parsing.readers.content import (
    ReadText,
    TextBuilder,
    UnreadableError,
    decode,
    kind_by_content,
    one_line,
)

_HEADERS = ("From", "To", "Cc", "Date")
_MAX_DEPTH = 8  # of messages in messages


_BEGIN = re.compile(rb"^From [^\n]*+\n(?=[\w-]++:|>?From )", re.MULTILINE)  # of a message in a mailbox (RFC 4155)
_STAMPED = re.compile(rb"\d\d:\d\d|^From -?\s*+$")  # which no "From Bergen" of a text is
_QUOTED = re.compile(rb"^>(?=>*+From )", re.MULTILINE)


def read_mail(data: bytes, name: str) -> ReadText:
    messages = [message_from_bytes(part, policy=default) for part in _messages(data)]
    if not any(_header(message, header) for message in messages for header in (*_HEADERS, "Subject")):
        raise UnreadableError("is named as an e-mail and is none; export it again, or name it .txt", "invalid_file")
    out = TextBuilder()
    for message in messages:
        _write(message, out, 0)
    return ReadText(
        one_line(_header(messages[0], "Subject")) if len(messages) == 1 else PurePath(name).name, out.build()
    )


def _messages(data: bytes) -> list[bytes]:
    """The messages of a mailbox, or the one message."""
    data = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not data.startswith(b"From "):
        return [data]
    found = [each for each in _BEGIN.finditer(data) if not each.start() or _STAMPED.search(each[0])]
    ends = [*(each.start() for each in found[1:]), len(data)]
    parts = (data[each.end() : end] for each, end in zip(found, ends, strict=False))
    return [_QUOTED.sub(b"", part) for part in parts] or [data.partition(b"\n")[2]]


def _header(message: Message, name: str) -> str:
    """A header; as it was written where it breaks the rules, as those of much spam do."""
    try:
        return str(message.get(name) or "")
    except Exception:  # of any type: the parser of addresses is lenient to some faults alone
        return " ".join(str(dict(message.raw_items()).get(name, "")).split())


def _write(message: Message, out: TextBuilder, depth: int) -> None:
    out.paragraph("# ")
    out.text(_header(message, "Subject"))
    out.paragraph()
    for header in _HEADERS:
        if said := _header(message, header):
            out.line()
            out.text(f"{header}: {said}")
    write_part(message, out, depth)


def write_part(part: Message, out: TextBuilder, depth: int = 0) -> None:
    """Append what a part of a message shows. depth: of messages in messages, so far."""
    kind = part.get_content_type()
    parts = [each for each in part.get_payload() if isinstance(each, Message)] if part.is_multipart() else []
    out.paragraph()
    if kind == "message/rfc822" and parts and depth < _MAX_DEPTH:
        _write(parts[0], out, depth + 1)
    elif kind == "multipart/alternative" and parts:  # the same in several forms, the plainest first
        before = out.num_characters
        for each in parts:
            if out.num_characters == before:  # the plainest may be empty
                write_part(each, out, depth)
    elif parts:
        for each in parts:
            write_part(each, out, depth)
    else:
        data = part.get_payload(decode=True)
        _write_data(part, data if isinstance(data, bytes) else b"", out)


def _write_data(part: Message, data: bytes, out: TextBuilder) -> None:
    """Append a part that holds no others: running text, or a file under its name."""
    name = part.get_filename() or ""
    is_file = part.get_content_disposition() == "attachment" or bool(name)
    try:
        if is_file or part.get_content_maintype() != "text":
            out.text(f"Attachment: {name or part.get_content_type()}")
            kind = kind_by_content(data, kind_of(name))
            if kind_of(name) is not None:
                text = reader(kind)(data, name).text.strip()
                out.paragraph()
                out.verbatim(text)
        elif part.get_content_subtype() == "html":
            from paceline.rag.parsing.readers.markup import write_markup

            write_markup(data, out, part.get_content_charset() or "")
        else:
            out.verbatim(decode(data, part.get_content_charset() or "").strip())
    except UnreadableError as error:
        if data.strip():
            out.text(f" ({error.reason})")
    except ImportError:
        raise
    except Exception as error:  # any, from a damaged file: the message may be whole
        out.text(f" (is damaged: {type(error).__name__})")
    out.paragraph()
