"""Tokenizer of any model folder with a `tokenizer.json`, and chat prompts by the model's own template.

Text of a message never becomes a special token: an end-of-turn mark in it is encoded as plain letters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ConfigError, PacelineError, RequestError

Message = Mapping[str, object]

PREAMBLE: Final = "Answer from this document.\n"
_END = "<|im_end|>"
CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models without a template of their own, as base models are: the form that most of them have met."""
_PRIVATE_USE: Final = range(0xE000, 0xF900)
_logger = logging.getLogger("paceline.engine")


class Tokenizer:
    """Vocabulary and chat template of one model. Made by `Tokenizer.load`."""

    def __init__(
        self, serialised: str, template: str | None, variables: Mapping[str, str], eos_ids: frozenset[int]
    ) -> None:
        """template: None for ChatML, whose end then ends an answer as well where the vocabulary has it as a token."""
        self._serialised = serialised
        self._hf = tokenizers.Tokenizer.from_str(serialised)
        self._hf.no_padding()
        self._hf.no_truncation()
        # Parsing of special tokens is a mode of the whole tokenizer, so calls that set it must not overlap.
        self._lock = threading.Lock()
        added = self._hf.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template = _compile(CHATML if template is None else template)
        self._variables = dict(variables)
        ends = (self._variables.get("eos_token", ""), *([_END] if template is None else []))
        self.eos_ids = eos_ids | {found for end in ends if (found := self._hf.token_to_id(end)) is not None}
        self.vocab_size: int = self._hf.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the tokenizer of a model folder."""
        source = path / "tokenizer.json"
        if not source.is_file():
            raise ConfigError(f"There is no tokenizer.json in {path}: give a folder that holds a Hugging Face model.")
        config = _json(path / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        variables = {name: content for name in names if (content := _content(config.get(name))) is not None}
        eos_ids = set(_ids(_json(path / "generation_config.json").get("eos_token_id")))
        eos_ids = eos_ids or set(_ids(_json(path / "config.json").get("eos_token_id")))
        template = _chat_template(path, config)
        if template is None:
            _logger.warning(
                "the model in %s has no chat template: conversations are written as ChatML, which it may not know; add "
                "a chat_template.jinja to its folder, or ask it with /v1/completions",
                path,
            )
        try:
            return cls(source.read_text(encoding="utf-8"), template, variables, frozenset(eos_ids))
        except PacelineError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"The tokenizer in {source} cannot be read: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over vocabulary, merges and special tokens: equal iff two models give every id the same meaning."""
        model = json.loads(self._serialised)["model"]
        merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        vocabulary = sorted(self._hf.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        special = sorted((token_id, self._added[token_id]) for token_id in self._special)
        identity = json.dumps([vocabulary, merges, special], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(identity.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Encode plain text; the names of special tokens in it are never parsed as special."""
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            self._hf.encode_special_tokens = not special
            return list(self._hf.encode(text, add_special_tokens=False).ids)

    def raw(self, text: str) -> list[int]:
        """Encode a prompt that is not a conversation, as transformers does: special tokens in it are parsed, and the
        model's BOS token is prepended. An empty prompt becomes the BOS token, or else the EOS token.

        Raises RequestError for an empty prompt if the model has neither.
        """
        with self._lock:
            self._hf.encode_special_tokens = False
            ids = list(self._hf.encode(text, add_special_tokens=True).ids)
        if not ids:
            names = (self._variables.get("bos_token"), self._variables.get("eos_token"))
            known = (self._hf.token_to_id(name) for name in names if name is not None)
            ids = [token_id for token_id in known if token_id is not None][:1]
        if not ids:
            raise RequestError("The prompt is empty, and the model has no token to begin with.", param="prompt")
        return ids

    def token_name(self, token_id: int) -> str:
        is_special = token_id in self._special
        return self._added[token_id] if is_special else self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        return str(self._hf.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, possibly a part of a character; empty for a special or unknown token."""
        if token_id in self._special:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._hf.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # Some vocabularies hold entries that are not byte-coded; these are plain text.
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._serialised).get("decoder"))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation up to where the assistant's answer begins, or goes on behind a last message of its.

        For a template that refuses system messages, the system text is prepended to the user's message.
        """
        plain = [_plain_message(message) for message in messages]
        escaped = _SpecialTokenEscape(plain, self._added.values())
        try:
            text = self._render(escaped.messages)
        except RequestError:
            match escaped.messages:
                case [{"role": "system", "content": system}, {"role": "user", "content": user} as first, *rest]:
                    text = self._render([first | {"content": f"{system}\n\n{user}"}, *rest])
                case _:
                    raise
        return escaped.encode(self, text)

    def document_prompt(self, messages: Sequence[Message], document: str) -> tuple[list[int], list[int], list[int]]:
        """Encode a prompt that begins with the document, as (preamble, document, rest).

        The three are encoded separately, so that the KV of preamble and document is exact for every later question.
        """
        escaped = _SpecialTokenEscape([_plain_message(message) for message in messages], self._added.values())
        mark = escaped.fresh()
        refusal: RequestError | None = None
        for layout in _layouts(escaped.messages, PREAMBLE + mark):
            try:
                text = self._render(layout)
            except RequestError as error:
                refusal = error
                continue
            if text.count(mark) == 1 and all(str(m["content"]).strip() in text for m in layout):
                head, tail = text.split(mark)
                return escaped.encode(self, head), self.encode(document), escaped.encode(self, tail)
        raise refusal or RequestError("The model's chat template has no place for a document.", param="messages")

    def _render(self, messages: Sequence[Message]) -> str:
        """The prompt of a conversation, up to where the answer goes on: a last message of the assistant is the answer's
        beginning."""
        begun = ""
        if messages and messages[-1]["role"] == "assistant":
            *messages, last = messages
            begun = str(last["content"])
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._variables) + begun
        except (TemplateError, TypeError, ValueError) as error:
            sentence = f"The model's chat template refuses these messages: {error}"
            raise RequestError(sentence, param="messages") from error


class _SpecialTokenEscape:
    """Conversation in whose contents each special token's text is replaced by a private-use character, the mark.

    A conversation without such text is encoded whole, exactly as transformers does it.
    """

    def __init__(self, messages: Sequence[dict[str, object]], forbidden: Iterator[str] | Any) -> None:
        text = json.dumps(messages, ensure_ascii=False, default=str)
        self._free = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        self._texts: dict[str, str] = {}
        # Longest first: the text of one special token may contain that of another.
        for name in sorted((name for name in set(forbidden) if name and name in text), key=len, reverse=True):
            self._texts[self.fresh()] = name
        self.messages = [{key: self._escape(value) for key, value in message.items()} for message in messages]

    def fresh(self) -> str:
        mark = next(self._free, None)
        if mark is None:
            raise RequestError("The messages use up all private-use characters.", param="messages")
        return mark

    def _escape(self, value: object) -> object:
        if isinstance(value, str):
            for mark, text in self._texts.items():
                value = value.replace(text, mark)
        return value

    def encode(self, tokenizer: Tokenizer, rendered: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for at, character in enumerate(rendered):
            if character in self._texts:
                ids += tokenizer._encode(rendered[start:at], special=True)
                ids += tokenizer.encode(self._texts[character])
                start = at + 1
        return ids + tokenizer._encode(rendered[start:], special=True)


def _layouts(messages: list[dict[str, object]], text: str) -> Iterator[list[dict[str, object]]]:
    """Conversations that begin with the document text: the preferred one first, last the one all templates accept."""
    document: dict[str, object] = {"role": "system", "content": text}
    yield [document, *messages]
    if messages and messages[0]["role"] == "system":
        own, messages = f"\n\n{messages[0]['content']}", messages[1:]
        text += own
        yield [{"role": "system", "content": text}, *messages]
    if messages and messages[0]["role"] == "user":
        yield [messages[0] | {"content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]


def _plain_message(message: Message) -> dict[str, object]:
    """A message with its text parts joined: templates of text models expect one string.

    A tool's result, which is marked as such in its text, becomes a user message, so that every template accepts it;
    Qwen2.5's own template renders it that way.
    """
    # The API has joined parts and replaced `developer` already, since it extends the system message
    # (`api/chat/messages.py`). Conversations of a peer, a demo or a bench have not passed there.
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    role = message.get("role")
    return dict(message) | {
        "role": {"developer": "system", "tool": "user"}.get(str(role), role),
        "content": "" if content is None else content,
    }


def _compile(template: str) -> Template:
    """Compile a template as transformers does: sandboxed, since it comes with the weights."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    for tag in ("generation", "endgeneration"):  # marks for training, without effect in a prompt
        for dash in (f"{{% {tag} %}}", f"{{%- {tag} %}}", f"{{% {tag} -%}}", f"{{%- {tag} -%}}"):
            template = template.replace(dash, "")
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ConfigError(f"The model's chat template cannot be read: {error}") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _ids(value: object) -> list[int]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]


def _byte_alphabet() -> dict[str, int]:
    """Inverse of GPT-2's table from bytes to printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF: Final = _byte_alphabet()
