"""Tokenizer of the fake model: one id per byte, and one for the end of text. Its chat format is plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from paceline.engine.base import NO_FIELDS

EOS = 256
VOCAB = 257


def _text(content: object) -> str:
    """Text of a message's content: a string, None, or OpenAI's list of parts, of which only text parts count."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


class ByteTokenizer:
    """`TextModel` over UTF-8 bytes."""

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    @property
    def fingerprint(self) -> str:
        return sha256(b"paceline bytes 1").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def raw(self, text: str) -> list[int]:
        return self.encode(text) or [EOS]

    def token_name(self, token: int) -> str:
        return "<|end|>" if token == EOS else self.decode([token])

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < EOS).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < EOS else b""

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template_kwargs: Mapping[str, object] = NO_FIELDS,  # noqa: ARG002  # its format has no variables
    ) -> list[int]:
        begun = ""
        if messages and messages[-1].get("role") == "assistant":
            *messages, last = messages
            begun = _text(last.get("content"))
        lines = "".join(f"{message.get('role', 'user')}: {_text(message.get('content'))}\n" for message in messages)
        return self.encode(f"{lines}assistant: {begun}")

    def document_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        document: str,
        *,
        template_kwargs: Mapping[str, object] = NO_FIELDS,  # noqa: ARG002
    ) -> tuple[list[int], list[int], list[int]]:
        return self.encode("document: "), self.encode(document + "\n"), self.chat(messages)
