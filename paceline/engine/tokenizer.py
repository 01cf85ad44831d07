"""Text to ids and back for any model folder with a `tokenizer.json`, and chat prompts by the model's own template.

Text from outside can never become a special token here: an end-of-turn mark in a message is a few letters.
"""

from __future__ import annotations

import hashlib
import json
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
_PRIVATE_USE: Final = range(0xE000, 0xF900)


class Tokenizer:
    """One model's vocabulary and chat template. Make it with `Tokenizer.load`."""

    def __init__(
        self, serialised: str, template: str | None, variables: Mapping[str, str], eos: frozenset[int]
    ) -> None:
        self._serialised = serialised
        self._reader = tokenizers.Tokenizer.from_str(serialised)
        self._reader.no_padding()
        self._reader.no_truncation()
        # Whether special tokens are seen in a text is a property of the whole reader: one call at a time.
        self._lock = threading.Lock()
        added = self._reader.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template = None if template is None else _compile(template)
        self._variables = dict(variables)
        end = self._reader.token_to_id(self._variables.get("eos_token", ""))
        self.eos_ids = eos if end is None else eos | {end}
        self.vocab_size: int = self._reader.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the tokenizer of a model folder."""
        source = path / "tokenizer.json"
        if not source.is_file():
            raise ConfigError(f"There is no tokenizer.json in {path}: give a folder that holds a Hugging Face model.")
        config = _json(path / "tokenizer_config.json")
        names = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        variables = {name: content for name, content in names.items() if content is not None}
        eos = set(_ids(_json(path / "generation_config.json").get("eos_token_id")))
        eos = eos or set(_ids(_json(path / "config.json").get("eos_token_id")))
        template = _chat_template(path, config)
        try:
            return cls(source.read_text(encoding="utf-8"), template, variables, frozenset(eos))
        except PacelineError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"The tokenizer in {source} cannot be read: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """A hash of vocabulary, merges and special tokens: equal exactly when two models read the same ids alike."""
        model = json.loads(self._serialised)["model"]
        merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        vocabulary = sorted(self._reader.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        special = sorted((token_id, self._added[token_id]) for token_id in self._special)
        identity = json.dumps([vocabulary, merges, special], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(identity.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, in which the names of special tokens are only letters."""
        return self._read(text, special=False)

    def _read(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            self._reader.encode_special_tokens = not special
            return list(self._reader.encode(text, add_special_tokens=False).ids)

    def raw(self, text: str) -> list[int]:
        """Ids of a prompt that is no conversation, as transformers reads it: special tokens are seen in it, and the
        model's own beginning is put in front. An empty text is the beginning, or else the end, of a text.

        Raises RequestError when it is empty and the model has no such token.
        """
        with self._lock:
            self._reader.encode_special_tokens = False
            ids = list(self._reader.encode(text, add_special_tokens=True).ids)
        if not ids:
            names = (self._variables.get("bos_token"), self._variables.get("eos_token"))
            known = (self._reader.token_to_id(name) for name in names if name is not None)
            ids = [token_id for token_id in known if token_id is not None][:1]
        if not ids:
            raise RequestError("The prompt is empty, and the model has no token to begin with.", param="prompt")
        return ids

    def token_name(self, token_id: int) -> str:
        if token_id in self._special:
            return self._added[token_id]
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._reader.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, possibly a part of a character; none for a special or unknown token."""
        if token_id in self._special:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._reader.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # A few vocabularies hold entries that are not byte-coded; those stand for themselves.
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._serialised).get("decoder"))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        A template that knows no system message is given its text as the beginning of the user's.
        """
        plain = [_plain_message(message) for message in messages]
        shielded = _Shield(plain, self._added.values())
        try:
            text = self._render(shielded.messages)
        except RequestError:
            match shielded.messages:
                case [{"role": "system", "content": told}, {"role": "user", "content": asked} as first, *rest]:
                    text = self._render([first | {"content": f"{told}\n\n{asked}"}, *rest])
                case _:
                    raise
        return shielded.encode(self, text)

    def document_prompt(self, messages: Sequence[Message], document: str) -> tuple[list[int], list[int], list[int]]:
        """Ids of the preamble, the document and the rest of a prompt that tells the document first.

        The three are tokenised apart, so that the cached keys and values of preamble and document are exact for every
        question to come.
        """
        shielded = _Shield([_plain_message(message) for message in messages], self._added.values())
        mark = shielded.fresh()
        refusal: RequestError | None = None
        for layout in _layouts(shielded.messages, PREAMBLE + mark):
            try:
                text = self._render(layout)
            except RequestError as error:
                refusal = error
                continue
            if text.count(mark) == 1 and all(str(m["content"]).strip() in text for m in layout):
                head, tail = text.split(mark)
                return shielded.encode(self, head), self.encode(document), shielded.encode(self, tail)
        raise refusal or RequestError("The model's chat template has no place for a document.", param="messages")

    def _render(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            raise ConfigError("The model has no chat template: add a chat_template.jinja to its folder.")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._variables)
        except (TemplateError, TypeError, ValueError) as error:
            sentence = f"The model's chat template refuses these messages: {error}"
            raise RequestError(sentence, param="messages") from error


class _Shield:
    """Conversations with every special token's text in their contents replaced by a mark of private-use characters.

    Without such text the rendered conversation is encoded whole, exactly as transformers does it.
    """

    def __init__(self, messages: Sequence[dict[str, object]], forbidden: Iterator[str] | Any) -> None:
        told = json.dumps(messages, ensure_ascii=False, default=str)
        self._free = (chr(code) for code in _PRIVATE_USE if chr(code) not in told)
        self._shielded: dict[str, str] = {}
        # Longest first: one special token's text may contain another's.
        for text in sorted((t for t in set(forbidden) if t and t in told), key=len, reverse=True):
            self._shielded[self.fresh()] = text
        self.messages = [{key: self._cover(value) for key, value in message.items()} for message in messages]

    def fresh(self) -> str:
        mark = next(self._free, None)
        if mark is None:
            raise RequestError("The messages use up all private-use characters.", param="messages")
        return mark

    def _cover(self, value: object) -> object:
        if isinstance(value, str):
            for mark, text in self._shielded.items():
                value = value.replace(text, mark)
        return value

    def encode(self, tokenizer: Tokenizer, rendered: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for at, character in enumerate(rendered):
            if character in self._shielded:
                ids += tokenizer._read(rendered[start:at], special=True)
                ids += tokenizer.encode(self._shielded[character])
                start = at + 1
        return ids + tokenizer._read(rendered[start:], special=True)


def _layouts(messages: list[dict[str, object]], told: str) -> Iterator[list[dict[str, object]]]:
    """Ways to tell a document first, from the best to the one that every template accepts."""
    document: dict[str, object] = {"role": "system", "content": told}
    yield [document, *messages]
    if messages and messages[0]["role"] == "system":
        own, messages = f"\n\n{messages[0]['content']}", messages[1:]
        told += own
        yield [{"role": "system", "content": told}, *messages]
    if messages and messages[0]["role"] == "user":
        yield [messages[0] | {"content": f"{told}\n\n{messages[0]['content']}"}, *messages[1:]]


def _plain_message(message: Message) -> dict[str, object]:
    """A message with its text parts joined: templates of text models expect one string.

    What functions returned is marked as such in its text, so every template can tell it, as the user's turn, which is
    how Qwen2.5's own template tells it.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    role = message.get("role")
    return dict(message) | {
        "role": {"developer": "system", "tool": "user"}.get(str(role), role),
        "content": "" if content is None else content,
    }


def _compile(template: str) -> Template:
    """Compile a template as transformers does: sandboxed, since it comes with the weights and not from us."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    for tag in ("generation", "endgeneration"):  # marks for training, of no effect in a prompt
        for dash in (f"{{% {tag} %}}", f"{{%- {tag} %}}", f"{{% {tag} -%}}", f"{{%- {tag} -%}}"):
            template = template.replace(dash, "")
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ConfigError(f"The model's chat template cannot be read: {error}") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    alone = path / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):  # several by name
        given = {entry["name"]: entry["template"] for entry in given}.get("default")
    return given if isinstance(given, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return read if isinstance(read, dict) else {}


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _ids(value: object) -> list[int]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte, turned round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF: Final = _byte_alphabet()
