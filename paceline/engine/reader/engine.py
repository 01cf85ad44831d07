"""The reader behind the engine contract.

A row is its token: what a row predicts is a function of the tokens before it, and the encoder reads a prompt once, at
the first row of its answer. So nothing is cached but tokens and, for sequences of the same salt, answers; rows may be
exported and imported, and a prompt that is no conversation gets a distribution that ends at once. On the CPU only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.core.attached import taken_apart
from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import PlacedSegment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import ModelInfo
from paceline.engine.model_config import sampling_defaults
from paceline.engine.reader.answer import (
    FIRST,
    JOINTS,
    NOTHING,
    NOTHING_OF_SEVERAL,
    AnswerDists,
    Form,
    Ids,
    Spelling,
    Texts,
    ValuePath,
    Wording,
    listed,
    part_of,
)
from paceline.engine.reader.place import shared_words, words_in
from paceline.engine.reader.pointer import Pointer, SpanCalibration, SpanReading
from paceline.engine.reader.question import (
    ABILITIES,
    CANNOT,
    ENGLISH_ONLY,
    asked,
    asks_all,
    is_foreign,
    of_kind,
    own_answer,
    parts_of,
    question_for,
    words_of,
)
from paceline.engine.sequence_table import RowListEngine
from paceline.engine.tokenizer import PREAMBLE, Tokenizer
from paceline.errors import ConfigError, EngineError
from paceline.hub.cache import json_object
from paceline.hub.gguf import kept_as

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


# What the API adds to a system message: the functions that may be called, and the schema of the answer.
_TOOL_MARKS = ("# Tools\n", "<tools>\n", "\n</tools>", "</tool_call>")  # in this order
_SCHEMA = re.compile(r"Answer with JSON of this schema[^\n]*:\n[^\n]*")
_RESULT, _RESULT_END = "<tool_response>\n", "\n</tool_response>"


class ReaderInput(NamedTuple):
    """What is to be read and what is asked of it."""

    document: str  # "" if there is none
    message: str
    whole: str = ""  # the message and what is before the question in it
    earlier: str = ""  # what the user has said before
    tools: tuple[tuple[str, str], ...] = ()  # name and description of each function that may be called
    is_answered: bool = False  # a function has been called for this message


class PromptReader:
    """Document and question of a prompt, taken apart at the marks of roles, which no text of a message can hold."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = {tokenizer.token_name(token): token for token in range(min(tokenizer.vocab_size, 64))}
        self._system, self._user, self.assistant, self.end = (names[role] for role in ROLES)

    def read(self, prompt: Sequence[int]) -> ReaderInput:
        """The document is the text behind the preamble; without one, what the system and the user have said before the
        question, or what a function has returned."""
        document, instructions, message, earlier, results = "", "", "", "", ""
        tools: tuple[tuple[str, str], ...] = ()
        for role, ids in self._messages(prompt):
            text = self._tokenizer.decode(ids)
            if role == self._system and text.startswith(PREAMBLE):
                document = text.removeprefix(PREAMBLE)
            elif role == self._system:
                lines, text = _without_tools(text)
                tools = _functions(lines) if lines else tools
                instructions = _SCHEMA.sub("", text).strip()
            elif role == self._user and (returned := _returned(text)):
                results = "\n".join(returned)
            elif role == self._user:
                earlier, message, results = message, text, ""
        message, attached = taken_apart(message)
        before, question = asked(message)
        given = "\n".join(text for text in (instructions, before, *attached, results) if text)
        question = question if given and not document else message
        whole = "\n".join([*attached, message])
        return ReaderInput(document or given, question, whole, earlier, tools, bool(results))

    def _messages(self, prompt: Sequence[int]) -> list[tuple[int, list[int]]]:
        roles = (self._system, self._user, self.assistant)
        found: list[tuple[int, list[int]]] = []
        for token in prompt:
            if token in roles:
                found.append((token, []))
            elif found and token != self.end:
                found[-1][1].append(token)
        return found


def _without_tools(text: str) -> tuple[str, str]:
    """The functions, a line each, that a system message has by the API, and the message without them."""
    ends, at = list[int](), 0
    for mark in _TOOL_MARKS:
        if (found := text.find(mark, at)) < 0:
            return "", text
        at = found + len(mark)
        ends.append(at)
    begin = ends[0] - len(_TOOL_MARKS[0])
    return text[ends[1] : ends[2] - len(_TOOL_MARKS[2])], text[:begin] + text[at:]


def _returned(text: str) -> list[str]:
    parts = (part.partition(_RESULT_END) for part in text.split(_RESULT)[1:])
    return [result for result, end, _ in parts if end]


def _functions(lines: str) -> tuple[tuple[str, str], ...]:
    try:
        found = [json.loads(line)["function"] for line in lines.splitlines()]
        return tuple((str(each["name"]), str(each.get("description", ""))) for each in found)
    except (ValueError, KeyError, TypeError):  # of somebody who writes as the API does
        return ()


KIND = "paceline_reader"  # `model_type` of its config.json
_PROMPTS = 256  # whose answers are kept, each for its owner
_VALUES = 256  # of an answer in JSON
_KNOWN = 0.5  # that a document answers: its words may be those of an answer
_LEAST = 0.001  # mass of a text worth naming
_CLEAR = 0.5  # share of a text of the message that is taken for a value
_WHOLE = frozenset({"query", "question", "input", "prompt", "task", "search query", "q"})


class ReaderEngine(RowListEngine[int]):
    """A row is its token."""

    def __init__(self, info: ModelInfo, pointer: Pointer, tokenizer: Tokenizer) -> None:
        super().__init__(info)
        self._pointer = pointer
        self._tokenizer = tokenizer
        self._prompts = PromptReader(tokenizer)
        self._wording = _wording(tokenizer, self._prompts.end)
        every = range(tokenizer.vocab_size)
        self._vocabulary = Spelling(list(map(tokenizer.token_bytes, every)), tokenizer.encode, self._prompts.end)
        self._answer_of = lru_cache(maxsize=_PROMPTS)(self._answer)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        self._table.export(seq, len(tokens))
        rows = np.array(self._rows[seq][: len(tokens)], dtype=np.int64)[None, :, None, None]
        return KvPrefix(self._info.fingerprint, "int64", tuple(tokens), rows, rows[..., :0])

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        if rows.model != self._info.fingerprint or rows.keys.shape != (1, len(rows.tokens), 1, 1):
            raise EngineError(f"these rows are of another model: {rows.keys.shape}")
        self._table.adopt(seq, rows.tokens)
        self._rows[seq] = rows.keys.ravel().tolist()

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        """No rows are kept of sequences that have ended: they cost nothing to write again."""
        del tokens, stored
        self._begin(seq, salt)
        return 0

    def _append(self, segment: PlacedSegment) -> tuple[Dist, ...]:
        held = self._rows.setdefault(segment.seq, [])
        before = held[: segment.start - segment.num_open_rows]
        held.extend(segment.tokens)
        tree = held[len(before) :]
        seen = segment.mask() if segment.wanted else ()
        paths = ([token for token, on_path in zip(tree, seen[row], strict=True) if on_path] for row in segment.wanted)
        owner = self._salts.get(segment.seq, segment.seq)
        return tuple(self._dist(owner, (*before, *path)) for path in paths)

    def _dist(self, owner: str | SeqId, tokens: Ids) -> Dist:
        mark = self._prompts.assistant
        if mark not in tokens:
            return Dist.dense(self._wording.plain)  # of a row of the prompt
        cut = len(tokens) - tokens[::-1].index(mark)
        return self._answer_of(owner, tokens[:cut]).next(tokens[cut:])

    def _answer(self, owner: str | SeqId, prompt: Ids) -> AnswerDists:
        """owner: for whom it is kept: the time of an answer tells nobody what others have asked."""
        del owner
        asked, wording = self._prompts.read(prompt), self._wording
        if (own := own_answer(asked.whole, asked.earlier)) is not None:
            return self._own(asked, *own)
        parts = parts_of(asked.message)
        nothing = wording.nothing if len(parts) == 1 else wording.nothing_of_several
        if is_foreign(asked.message):
            nothing = wording.foreign
        alone = not asked.document
        readings = [self._pointer.read(part, asked.document) for part in parts]
        read = []
        for reading in readings:
            spans = [(tuple(self._tokenizer.encode(text)), prob) for text, prob in reading.spans]
            read.append(part_of(spans, reading.answered, nothing, alone=alone))
        best = max(readings, key=lambda reading: reading.answered)
        words = dict.fromkeys(("none", "unknown", "other"), 1.0 - best.answered)
        if best.answered > _KNOWN:
            words |= dict.fromkeys(words_in(asked.document), 1.0) | {"yes": 3.0}
            words |= dict.fromkeys(words_in(best.spans[0][0]), 4.0)
        words |= dict.fromkeys(words_in(asked.message), 2.0)
        values = lru_cache(maxsize=_VALUES)(partial(self._values, asked, parts, best.answered))
        form = Form(self._vocabulary, partial(_texts, values), words, _function(asked), alone)
        return AnswerDists(read, wording, form)

    def _own(self, asked: ReaderInput, text: str, values: Mapping[str, str]) -> AnswerDists:
        """An answer that is in no document. values: by names of properties, in an answer in JSON."""

        def named(name: str, is_argument: bool) -> Texts:  # noqa: ARG001  # of whatever is called
            value = values.get(name, "" if len(values) > 1 else text)
            return ((value, 0.9),) if value else ()

        form = Form(self._vocabulary, partial(_texts, named), {}, _function(asked), alone=True)
        part = ((tuple(self._tokenizer.encode(text)), 0.99),)
        return AnswerDists((part,), replace(self._wording, stop=()), form)

    def _values(self, asked: ReaderInput, parts: Sequence[str], answered: float, name: str, is_argument: bool) -> Texts:
        """Texts that a property of this name may have as its value, in an answer in JSON or in the arguments of a call.

        answered: probability that the document answers the message, by which its own texts count where that asks.
        """
        words = words_of(name)
        read = self._pointer.read(question_for(name, parts), asked.document)
        said: Texts = ()
        if not asks_all(words) and (is_argument or "?" not in asked.message):  # else it tells nothing
            said = _of_message(self._pointer.read(f"What is the {words}?", asked.message))
        if is_argument and not said and words in _WHOLE and not asked.is_answered:
            said = ((asked.message, 1.0),)
        # The branches of all documents say the same of the message: one that knows better must outweigh them.
        share = 0.9 if is_argument or not asked.document else 0.3
        share *= 1.0 if is_argument else 1.0 - read.answered
        found = [(text, share * prob) for text, prob in said]
        left = 1.0 - sum(mass for _, mass in found)
        left *= read.answered * (answered if "?" in asked.message and not is_argument else 1.0)
        found += [(of_kind(text, words), left * prob) for text, prob in read.spans]
        return [(text, mass) for text, mass in found if mass > _LEAST]


def _wording(tokenizer: Tokenizer, end: int) -> Wording:
    size = tokenizer.vocab_size
    ordinary = np.array([bool(tokenizer.token_bytes(token)) for token in range(size)], dtype=np.float64)

    def ids(text: str) -> Ids:
        return tuple(tokenizer.encode(text))

    return Wording(
        vocab_size=size,
        plain=ordinary / ordinary.sum(),
        nothing=ids(NOTHING),
        foreign=ids(ENGLISH_ONLY),
        nothing_of_several=ids(NOTHING_OF_SEVERAL),
        first=ids(FIRST),
        joints=tuple(map(ids, JOINTS)),
        stop=ids("."),
        end=end,
    )


def _texts(values: Callable[[str, bool], Texts], path: ValuePath) -> Texts:
    """values: by the name of a property, and whether it is an argument."""
    names = [each for each in path if isinstance(each, str)]
    is_argument = names[:1] == ["arguments"]
    if is_argument and len(names) == 1:
        return ()
    places = [each for each in path if isinstance(each, int)]
    found = values(names[-1] if names else "", is_argument)
    return listed(found, places[-1]) if places else found


def _of_message(reading: SpanReading) -> Texts:
    """The one text of the question that can be a value, as the town of "How is the weather in Paris?"."""
    text, prob = reading.spans[0] if reading.spans else ("", 0.0)
    return ((text, prob),) if prob >= _CLEAR else ()


def _function(asked: ReaderInput) -> str:
    """The function to be called: that which shares most words with the question, or ends what has been answered."""
    last = next((name for name, _ in asked.tools if re.search("final|answer|finish|submit", name)), "")
    if asked.is_answered and last:
        return last
    scores = {name: shared_words(asked.message, f"{words_of(name)} {about}") for name, about in asked.tools}
    best = max(scores, key=scores.__getitem__, default="")
    return best if scores.get(best) else last


def is_reader(directory: Path) -> bool:
    return json_object(directory / "config.json").get("model_type") == KIND


def load_reader(directory: Path, *, name: str, fingerprint: str) -> ReaderEngine:
    """Raises ConfigError for a folder that lacks weights, and where the embedder is not installed."""
    pointer, tokenizer = load_pointer(directory), Tokenizer.load(directory)
    info = ModelInfo(
        name=name,
        fingerprint=fingerprint,
        vocab_size=tokenizer.vocab_size,
        max_positions=int(json_object(directory / "config.json")["max_position_embeddings"]),
        dtype="float32",
        backend="reader",
        sampling=sampling_defaults(directory),
        num_weights=pointer.num_weights,
        refusals=(NOTHING, ENGLISH_ONLY, CANNOT, ABILITIES),
        kept_as=kept_as(directory),
    )
    return ReaderEngine(info, pointer, tokenizer)


def load_pointer(directory: Path) -> Pointer:
    """Read the trained weights of the folder; the word embeddings are those of the installed embedder.

    Raises ConfigError as `load_reader` does.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from paceline.encoder import WORDS, installed_tokenizer, installed_weights

    config = json_object(directory / "config.json")
    try:
        weights = {key: value.astype(np.float32) for key, value in load_file(directory / "model.safetensors").items()}
        calibration = SpanCalibration(*(float(config[name]) for name in ("middle", "slope", "words")))
        int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be loaded ({error}): install paceline again") from error
    weights[WORDS] = installed_weights()[WORDS]
    return Pointer(weights, installed_tokenizer(), calibration)
