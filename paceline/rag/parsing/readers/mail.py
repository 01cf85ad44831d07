"""E-mail (RFC 5322, MIME), one message or a mailbox: who wrote when to whom, the text, and what is attached: its text
if it is of a kind that is read, else its name.

Not handled: signatures and encrypted bodies, which are named as what is attached.
"""

from __future__ import annotations

import re
from email import message_from_bytes
from email.message import Message
from email.policy import default

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


_NEXT = re.compile(rb"(?:^|\r?\n\r?\n)From [^\n]*\n(?=[\w-]+:)")  # of a mailbox (RFC 4155)


def read_mail(data: bytes, _name: str) -> ReadText:
    parts = _NEXT.split(data)[1:] if data.startswith(b"From ") else [data]
    messages = [message_from_bytes(part, policy=default) for part in parts]
    if not any(message.get(header) for message in messages for header in (*_HEADERS, "Subject")):
        raise UnreadableError("is named as an e-mail and is none; export it again, or name it .txt", "invalid_file")
    out = TextBuilder()
    for message in messages:
        _write(message, out, 0)
    return ReadText(one_line(messages[0].get("Subject") or "") if len(messages) == 1 else "", out.build())


def _write(message: Message, out: TextBuilder, depth: int) -> None:
    out.paragraph("# ")
    out.text(str(message.get("Subject") or ""))
    out.paragraph()
    for header in _HEADERS:
        if message.get(header):
            out.line()
            out.text(f"{header}: {message.get(header)}")
    write_part(message, out, depth)


def write_part(part: Message, out: TextBuilder, depth: int = 0) -> None:
    """Append what a part of a message shows. depth: of messages in messages, so far."""
    kind = part.get_content_type()
    parts = [each for each in part.get_payload() if isinstance(each, Message)] if part.is_multipart() else []
    out.paragraph()
    if kind == "message/rfc822" and parts and depth < _MAX_DEPTH:
        _write(parts[0], out, depth + 1)
    elif kind == "multipart/alternative" and parts:  # the same in several forms, the plainest first
        write_part(parts[0], out, depth)
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

            write_markup(data, out)
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
