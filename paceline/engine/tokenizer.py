"""Tokenizer of any model folder with a `tokenizer.json`, and chat prompts by the model's own template.

Text of a message never becomes a special token: an end-of-turn mark in it is encoded as plain letters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Self

import tokenizers
from jinja2 import TemplateError

from paceline.engine.base import NO_FIELDS
from paceline.engine.chat_template import ChatTemplate
from paceline.engine.families import format_of, marks_of, switched
from paceline.errors import ConfigError, PacelineError, RequestError

Message = Mapping[str, object]
Conversation = list[dict[str, Any]]  # role and content of each message, the content as text
Layout = Callable[[Conversation], Conversation]

PREAMBLE: Final = "Answer from this document.\n"
_END = "<|im_end|>"
CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models without a template of their own, as base models are: the form that most of them have met."""
_PRIVATE_USE: Final = range(0xE000, 0xF900)
_QUESTION: Final[Conversation] = [{"role": "user", "content": "Which one is it?"}]
_OWN_NAMES: Final = {"messages", "conversations", "tools", "documents", "chat_template"} | {
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("self", "raise_exception", "strftime_now", "namespace", "dict"),  # what templates call
}
_MAX_FAULT: Final = 300  # characters of a template's error
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
_logger = logging.getLogger("paceline.engine")


class Tokenizer:
    """`TextModel` of one model's vocabulary and chat template. Made by `Tokenizer.load`."""

    one_document: bool = False

    def __init__(self, serialised: bytes, template: str | None, special: SpecialTokens) -> None:
        """template: None for ChatML, whose end then ends an answer as well where the vocabulary has it as a token."""
        self._hf = tokenizers.Tokenizer.from_buffer(serialised)
        self._hf.no_padding()
        self._hf.no_truncation()
        self._hf.add_tokens([*_further_tokens(self._hf, special)])
        # Parsing of special tokens is a mode of the whole tokenizer, so calls that set it must not overlap.
        self._lock = threading.Lock()
        added = self._hf.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        try:
            self._template = ChatTemplate(CHATML if template is None else template)
        except TemplateError as error:
            raise ConfigError(f"The model's chat template cannot be read: {error}") from error
        form = format_of(self._template.source)
        self.thinking, self.tools = marks_of(self._template.source), form.name
        own = "".join((form.text, *(self.thinking or ())))
        self._silent = frozenset(token_id for token_id, text in self._special.items() if text not in own)
        names = {name: self._hf.id_to_token(token_id) for name, token_id in special.ids.items() if token_id >= 0}
        self._variables = {name: text for name, text in (names | dict(special.names)).items() if text is not None}
        ends = (self._variables.get("eos_token", ""), *([_END] if template is None else []))
        self.eos_ids = special.ends | {found for end in ends if (found := self._hf.token_to_id(end)) is not None}
        vocabulary, content = self._hf.get_vocab(with_added_tokens=True), json.loads(serialised)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.num_pieces = self._hf.get_vocab_size(with_added_tokens=False)  # any text may have any of them
        self.fingerprint = _fingerprint(vocabulary, content["model"], self._special)
        kinds = re.findall(r'"type": "(\w+)"', json.dumps(content.get("decoder")))
        self._decoders = frozenset(kinds + ["ByteFallback"] * bool(content["model"].get("byte_fallback")))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the tokenizer of a model folder. Raises ConfigError."""
        source = path / "tokenizer.json"
        if not source.is_file():
            raise ConfigError(f"There is no tokenizer.json in {path}: give a folder that holds a Hugging Face model.")
        try:
            template = _chat_template(path)
            if template is None:
                _logger.warning(
                    "the model in %s has no chat template: conversations are written as ChatML, which it may not know; "
                    "add a chat_template.jinja to its folder, or ask it with /v1/completions",
                    path,
                )
            tokenizer = cls(source.read_bytes(), template, SpecialTokens.read(path))
            tokenizer.one_document = _json(path / "tokenizer_config.json").get("one_document") is True
            return tokenizer
        except PacelineError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"The tokenizer in {source} cannot be read: {error}") from error

    def encode(self, text: str, *, own: bool = False) -> list[int]:
        with self._lock:
            self._hf.encode_special_tokens = not own
            return list(self._hf.encode(text, add_special_tokens=False).ids)

    def raw(self, text: str) -> list[int]:
        """An empty prompt becomes the BOS token, or else the EOS token. Raises RequestError where the model has
        neither."""
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
        name = self._special.get(token_id)
        return self.token_bytes(token_id).decode("utf-8", "replace") if name is None else name

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._hf.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, maybe a part of a character; empty for unknown and special ones that are no marks."""
        if token_id in self._silent:
            return b""
        token = self._added.get(token_id) or self._hf.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            # Some vocabularies hold entries that are not byte-coded; these are plain text, as are added tokens.
            try:
                return token.encode() if token_id in self._added else token.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        if (byte := _BYTE_TOKEN.fullmatch(token)) and "ByteFallback" in self._decoders:
            return bytes([int(byte[1], 16)])
        # What it adds between two letters: a decoder takes blanks and marks away at the ends of a text alone.
        before, behind = self._letters
        whole = self._joined(["x", token, "y"])
        return whole[before : len(whole) - behind].encode()

    @cached_property
    def _letters(self) -> tuple[int, int]:
        """Characters that x and y take up at the ends of a text, with the blank between them if there is one."""
        before = len(self._joined(["x"]))
        return before, len(self._joined(["x", "y"])) - before

    def _joined(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._hf.decoder is None else str(self._hf.decoder.decode(tokens))

    def chat(self, messages: Sequence[Message], *, template_kwargs: Mapping[str, object] = NO_FIELDS) -> list[int]:
        """Texts that a template refuses or leaves out are written elsewhere: the system's at the head of the user's
        message, and messages of one role in a row as one. Raises RequestError for a conversation that the template
        does not show in any of these ways."""
        asked = _Asked(messages, self._special.values(), template_kwargs)
        refusal: RequestError | None = None
        for layout in _LAYOUTS:
            try:
                text = self._shown(layout, asked)
            except RequestError as error:
                refusal = refusal or error
                continue
            if text is not None:
                return asked.encode(self, text)
        raise refusal or RequestError(
            "The model's chat template leaves out the system message or a part of the last question, wherever it is "
            "written: give the model another chat_template.jinja, or ask it with /v1/completions.",
            param="messages",
        )

    def document_prompt(
        self, messages: Sequence[Message], document: str, *, template_kwargs: Mapping[str, object] = NO_FIELDS
    ) -> tuple[list[int], list[int], list[int]]:
        """Where a template can only place the document behind earlier messages, the preamble holds these."""
        asked = _Asked(messages, self._special.values(), template_kwargs)
        mark = asked.fresh()
        refusal: RequestError | None = None
        placed: tuple[str, str] | None = None
        for layout in _document_layouts(PREAMBLE + mark):
            try:
                text = self._shown(layout, asked)
            except RequestError as error:
                refusal = error
                continue
            if text is None or text.count(mark) != 1:
                continue
            head, tail = text.split(mark)
            placed = placed or (head, tail)
            if head == self._head(layout, asked, mark):
                placed = head, tail
                break
        if placed is None:
            raise refusal or RequestError("The model's chat template has no place for a document.", param="messages")
        return asked.encode(self, placed[0]), self.encode(document), asked.encode(self, placed[1])

    def _head(self, layout: Layout, asked: _Asked, mark: str) -> str | None:
        """What stands before the document when any one question is asked; None where that cannot be rendered."""
        try:
            return self._render(layout(_QUESTION), asked.variables).split(mark)[0]
        except RequestError:
            return None

    def _shown(self, layout: Layout, asked: _Asked) -> str | None:
        """The conversation in this layout, rendered; None where system text or the last question is not all there.

        Earlier turns are the template's: many leave reasoning out of them. Raises RequestError where it refuses.
        """
        text = ""
        for text in self._renderings(layout(asked.messages), asked):
            if all(asked.messages[index]["content"].strip() in text for index in asked.required):
                return text
        # A template may change a text, as where it takes out a switch; both ends of it are then to be found.
        marked, marks = asked.marked()
        try:
            probe = self._render(layout(marked), asked.variables)
        except RequestError:
            return None
        return text if all(mark in probe for mark in marks) else None

    def _renderings(self, messages: Conversation, asked: _Asked) -> Iterator[str]:
        """The prompt; of an answer that has begun also that with its beginning behind the template's start of one."""
        if asked.continues:
            *before, begun = messages
            with suppress(RequestError):
                text = self._render(messages, asked.variables, continues=True)
                if text.endswith(begun["content"]):  # not where a template trims it
                    yield text
            yield self._render(before, asked.variables) + begun["content"]
        else:
            yield self._render(messages, asked.variables)

    @cached_property
    def _roles_in_parts(self) -> frozenset[str]:
        """Roles whose content the template reads as a list of parts alone, as those of models with images do."""
        found: set[str] = set()
        probe = "2718281828"
        for role in ("user", "assistant", "system"):
            before, after = ([] if role != "assistant" else _QUESTION), ([] if role == "user" else _QUESTION)
            messages = [*before, {"role": role, "content": probe}, *after]
            shows: list[bool] = []
            for roles in (found, found | {role}):
                try:
                    text = self._render(messages, {}, roles=frozenset(roles))
                except RequestError:
                    text = ""
                shows.append(probe in text and str(_parts(probe)) not in text)
            if shows == [False, True]:
                found.add(role)
        return frozenset(found)

    def _render(
        self,
        messages: Conversation,
        variables: Mapping[str, object],
        *,
        continues: bool = False,
        roles: frozenset[str] | None = None,
    ) -> str:
        """roles: whose content is written in parts; None: those that the template reads so."""
        roles = self._roles_in_parts if roles is None else roles
        written = [m | {"content": _parts(m["content"])} if m["role"] in roles else m for m in messages]
        try:
            return self._template.render(written, {**self._variables, **switched(variables)}, continues=continues)
        except Exception as error:  # a template is a program, which may end in any error
            if isinstance(error, TemplateError):
                sentence = f"The model's chat template refuses these messages: {str(error)[:_MAX_FAULT]}"
            elif continues and isinstance(error, ValueError):
                sentence = "The model's chat template cannot continue the last message: it changes or hides its text."
            else:
                fault = f"{type(error).__name__}: {error}"[:_MAX_FAULT]
                sentence = f"The model's chat template fails at these messages ({fault}): it needs to be corrected."
            raise RequestError(sentence, param="messages") from error


class _Asked:
    """A conversation in whose texts each special token's text is replaced by a private-use character, the mark.

    One without such text is encoded whole, exactly as transformers does it.
    """

    def __init__(self, messages: Sequence[Message], forbidden: Iterable[str], variables: Mapping[str, object]) -> None:
        if reserved := sorted(_OWN_NAMES & variables.keys()):
            raise RequestError(
                f"chat_template_kwargs may not set {reserved[0]}, which this server sets.", param="chat_template_kwargs"
            )
        begun = bool(messages) and messages[-1]["role"] == "assistant"
        self.continues = begun and bool(messages[-1].get("content"))
        asked = messages[:-1] if begun and not self.continues else messages
        plain = [_plain_message(message) for message in asked]
        text = "\n".join(_strings([plain, variables]))
        self._text = text
        self._free = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        self._texts: dict[str, str] = {}
        # Longest first: the text of one special token may contain that of another.
        for name in sorted((name for name in set(forbidden) if name and name in text), key=len, reverse=True):
            self._texts[self.fresh()] = name
        self.messages: Conversation = [
            {key: self._escape(value) for key, value in message.items()} for message in plain
        ]
        self.variables = {key: self._escape(value) for key, value in variables.items()}
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        self.required = [
            index for index, message in enumerate(self.messages) if message["role"] == "system" or index in users[-1:]
        ]
        """Indices of the messages that a prompt must show: what the system says, and the last question."""

    def fresh(self) -> str:
        mark = next(self._free, None)
        if mark is None:
            raise RequestError("The messages use up all private-use characters.", param="messages")
        return mark

    def marked(self) -> tuple[Conversation, list[str]]:
        """The messages with a mark at either end of the required ones, and these marks: numbers, since a template may
        write all else in another way."""
        number = 3_141_592_653
        while str(number) in self._text:
            number += 1
        marked = list(self.messages)
        marks: list[str] = []
        for index in self.required:
            ends = f"{number}{index:06}1", f"{number}{index:06}2"
            marks += ends
            marked[index] = marked[index] | {"content": marked[index]["content"].join(ends)}
        return marked, marks

    def _escape(self, value: Any) -> Any:
        if isinstance(value, str):
            for mark, text in self._texts.items():
                value = value.replace(text, mark)
        elif isinstance(value, Mapping):
            return {self._escape(key): self._escape(inner) for key, inner in value.items()}
        elif isinstance(value, list):
            return [self._escape(inner) for inner in value]
        return value

    def encode(self, tokenizer: Tokenizer, rendered: str) -> list[int]:
        ids: list[int] = []
        begin = 0
        for end, character in enumerate(rendered if self._texts else ""):
            if character in self._texts:
                ids += tokenizer.encode(rendered[begin:end], own=True) + tokenizer.encode(self._texts[character])
                begin = end + 1
        return ids + tokenizer.encode(rendered[begin:], own=True)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _folded(messages: Conversation, *, keep: int) -> Conversation:
    """The same texts for templates that know no system messages, but `keep` first ones, and want roles to alternate."""
    folded: Conversation = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and index >= keep:
            message = message | {"role": "user"}
        if folded and folded[-1]["role"] == message["role"]:
            texts = (each for each in (folded[-1]["content"], message["content"]) if each)
            folded[-1] = folded[-1] | {"content": "\n\n".join(texts)}
        else:
            folded.append(message)
    return folded


def _at_last(messages: Conversation, *, text: str = "") -> Conversation:
    """The same for templates that render only the last message, whose text then begins with `text` and what systems
    say."""
    said = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    for message in reversed(others):
        if message["role"] == "user":
            content = "\n\n".join(each for each in (text, *said, message["content"]) if each)
            others = [message | {"content": content} if other is message else other for other in others]
            break
    return _folded(others, keep=0)


def _document_layouts(text: str) -> Iterator[Layout]:
    """Conversations that begin with the document's text, the preferred one first."""
    document = {"role": "system", "content": text}

    def joined(messages: Conversation) -> Conversation:
        if not messages or messages[0]["role"] != "system":
            return [document, *messages]
        return [document | {"content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]

    yield lambda messages: [document, *messages]
    yield joined
    yield lambda messages: _folded(joined(messages), keep=1)
    yield lambda messages: _folded([document, *messages], keep=0)
    yield partial(_at_last, text=text)


_LAYOUTS: Final[tuple[Layout, ...]] = (list, partial(_folded, keep=1), partial(_folded, keep=0), _at_last)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _plain_message(message: Message) -> dict[str, object]:
    """A message with its text parts joined: templates of text models expect one string.

    A tool's result, which is marked as such in its text, becomes a user message, so that every template accepts it;
    Qwen2.5's own template renders it that way.
    """
    # The API has joined parts and replaced `developer` already, since it extends the system message
    # (`api/chat/request.py`). Conversations of a peer, a demo or a bench have not passed there.
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    role = message.get("role")
    return dict(message) | {
        "role": {"developer": "system", "tool": "user"}.get(str(role), role),
        "content": "" if content is None else content,
    }


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):  # the latter: older models that read images
        template = _json(path / name).get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if isinstance(template, str):
            return template
    return None


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens of a model folder, from all files that may name them."""

    # Such as bos_token, as templates know them; None: the model has none.
    names: Mapping[str, str | None] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)  # of the same, where a configuration has numbers alone
    ends: frozenset[int] = frozenset()  # tokens that end an answer
    further: tuple[str, ...] = ()  # those without a name
    added: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # by id, as `added_tokens_decoder` has them

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read as transformers does: `added_tokens_decoder` makes a file of its own for the names obsolete."""
        config, own = _json(path / "tokenizer_config.json"), _json(path / "special_tokens_map.json")
        described = config.get("added_tokens_decoder")
        merged = own | config if isinstance(described, dict) else config | own
        further: list[object] = []
        for name in ("additional_special_tokens", "extra_special_tokens"):
            value = merged.get(name)
            if isinstance(value, dict):
                merged = value | merged
            elif isinstance(value, list):
                further += value
        names = {
            name: _content(value)
            for name, value in merged.items()
            if name.endswith("_token") and (value is None or _content(value) is not None)
        }
        if not isinstance(described, dict):
            known = {*names.values(), *map(_content, further)}
            described = {
                token_id: {"content": content, "special": content in known, "normalized": content not in known}
                for content, token_id in _json(path / "added_tokens.json").items()
            }
        model, generation = _json(path / "config.json"), _json(path / "generation_config.json")
        inner = model.get("text_config")
        sources = (generation, model, inner if isinstance(inner, dict) else {})
        sizes = [size for source in sources if type(size := source.get("vocab_size")) is int]
        added = {
            number: token
            for token_id, token in described.items()
            if _content(token) is not None and (number := int(token_id)) < min(sizes, default=number + 1)
        }
        ids = {
            name: found[0]
            for name in ("bos_token", "eos_token")
            if (found := next(filter(None, (_ids(source.get(f"{name}_id")) for source in sources)), None))
        }
        ends = next(filter(None, (_ids(source.get("eos_token_id")) for source in sources)), [])
        texts = tuple(content for value in further if (content := _content(value)) is not None)
        return cls(names, ids, frozenset(ends), texts, added)


def _fingerprint(vocabulary: Mapping[str, int], model: Mapping[str, Any], special: Mapping[int, str]) -> str:
    """sha256 over vocabulary, merges and special tokens."""
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
    # By name as well, since two names may share an id, and the library's order differs between processes.
    tokens = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    identity = json.dumps([tokens, merges, sorted(special.items())], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(identity.encode()).hexdigest()


def _further_tokens(hf: tokenizers.Tokenizer, special: SpecialTokens) -> Iterator[tokenizers.AddedToken]:
    """Added tokens that `tokenizer.json` lacks or describes otherwise.

    A token that has no id there is taken where its id follows the last one: the model could not read any other.
    """
    known = hf.get_added_tokens_decoder()
    contents = {token.content for token in known.values()}
    next_id = hf.get_vocab_size(with_added_tokens=True)
    for token_id, described in sorted(special.added.items()):
        flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        token = tokenizers.AddedToken(**{flag: described[flag] for flag in flags if flag in described})
        is_new = hf.token_to_id(token.content) is None
        if is_new and token_id != next_id:
            continue
        next_id += is_new
        contents.add(token.content)
        if repr(token) != repr(known.get(token_id)):
            yield token
    for content in dict.fromkeys((*special.names.values(), *special.further)):
        if content and content not in contents and hf.token_to_id(content) is not None:
            yield tokenizers.AddedToken(content, special=True)


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
    return [v for v in (value if isinstance(value, list) else [value]) if type(v) is int and v >= 0]


def _byte_alphabet() -> dict[int, int]:
    """Inverse of GPT-2's table from bytes to printable characters; other characters of one byte are none of it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(hidden, 0xFFFF) | {256 + n: byte for n, byte in enumerate(hidden)}


_BYTES: Final = _byte_alphabet()
