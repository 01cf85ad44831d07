"""From readings to next-token distributions: p(next | answer so far).

An answer is one text a part of the question, of several each on a line: `The first: A.`, `The second: B.` The text of
a part is a span of the document, or says that there is none. Where a document does not answer, nearly all of the mass
is spread over the vocabulary, and the sentence that says so has a little: in a mixture the branch that knows then
decides, and only where none does the sentence is the best of all. An answer that begins as JSON does goes on so:
`Form`. Pure: knows nothing of the encoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.sampling.dist import Dist, ProbArray

Ids = tuple[int, ...]
PartTexts = tuple[tuple[Ids, float], ...]
"""Texts that a document has for one part of the question, with their mass; what is missing to 1 is doubt."""

NOTHING = "I find no answer to this in the documents"
NOTHING_OF_SEVERAL = "no answer in the documents"
FIRST = "The first: "
JOINTS = (".\nThe second: ", ".\nThe third: ")
REFUSAL = 0.04  # mass of the sentence where a document does not answer: small, as each such branch adds its own
CLOSING = 0.05  # mass of the answer's end after a text that the document does not know
FORGETTING = 0.25  # share of the doubt that remains a token after the first, while a span fits
_CERTAIN = 0.999


@dataclass(frozen=True, slots=True)
class Wording:
    """The fixed texts as token ids of the model's vocabulary."""

    vocab_size: int
    plain: ProbArray  # (vocab,) uniform over all tokens but the special ones
    nothing: Ids
    nothing_of_several: Ids
    foreign: Ids  # likewise, where the question is in another language
    first: Ids  # begins an answer of several parts
    joints: tuple[Ids, ...]  # each begins with a token that no span holds
    stop: Ids
    end: int


def part_of(spans: Sequence[tuple[Ids, float]], answered: float, nothing: Ids, *, alone: bool) -> PartTexts:
    """alone: there is no document, so no other branch can know better."""
    share = 1.0 - CLOSING if alone else REFUSAL
    texts = [(text, answered * prob) for text, prob in spans]
    return (*texts, (nothing, (1.0 - answered) * share))


class AnswerDists:
    """Distributions of one prompt's answer."""

    def __init__(self, parts: Sequence[PartTexts], wording: Wording, form: Form | None = None) -> None:
        self._parts = parts
        self._wording = wording
        self._form = form

    def next(self, answer: Ids) -> Dist:
        """Distribution of the token after `answer`; a function of the two alone."""
        wording = self._wording
        number, said = 0, answer
        if len(self._parts) > 1:
            first = wording.first
            if len(said) < len(first) and first[: len(said)] == said:
                return self._only(first[len(said)])
            said = said[len(first) :] if said[: len(first)] == first else said
        for joint in wording.joints[: len(self._parts) - 1]:
            at = _find(said, joint)
            if at is None:
                break
            number, said = number + 1, said[at + len(joint) :]
        is_last = number == len(self._parts) - 1
        tail = (*wording.stop, wording.end) if is_last else wording.joints[number]
        begun = _begun(said, tail)
        if begun and not is_last:
            return self._only(tail[begun])
        probs: ProbArray = np.zeros(wording.vocab_size)
        doubt = 1.0
        for text, mass in self._parts[number]:
            whole = (*text, *tail)
            doubt -= mass
            if whole[: len(said)] == said and len(whole) > len(said):
                probs[whole[len(said)]] += mass
        known = float(probs.sum())
        if known == 0.0 and self._form is not None and (formed := self._form.next(answer)) is not None:
            return formed
        if known == 0.0 and said:
            probs[tail[begun]] += CLOSING
            probs[wording.end] += CLOSING / 10  # where a mask has no stop
            return Dist.dense(probs + (1.0 - float(probs.sum())) * wording.plain)
        doubt = max(doubt, 1e-6) * FORGETTING ** len(said)
        return Dist.dense((probs + doubt * wording.plain) / (known + doubt))

    def _only(self, token: int) -> Dist:
        probs: ProbArray = (1.0 - _CERTAIN) * self._wording.plain
        probs[token] += _CERTAIN
        return Dist.dense(probs)


def _find(said: Ids, joint: Ids) -> int | None:
    size = len(joint)
    return next((i for i in range(len(said) - size + 1) if said[i : i + size] == joint), None)


def _begun(said: Ids, joint: Ids) -> int:
    """How many tokens of the joint the text ends with."""
    return next((n for n in range(min(len(said), len(joint) - 1), 0, -1) if said[-n:] == joint[:n]), 0)


# ---- answers in JSON ------------------------------------------------------------------------------------------------
ValuePath = tuple[str | int, ...]  # of a value: names of properties and places in lists
Texts = Sequence[tuple[str, float]]  # and their mass

_CALL, _CALL_END = "<tool_call>\n", "\n</tool_call>"
# A hyphen behind a letter or a digit is no minus; what three digits do not follow divides no thousands.
_NUMBER = re.compile(r"(?:(?<![\w-])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d{1,3}(?:\.\d{3})+,\d+|\d+(?:[.,]\d+)?)")
_SCALAR = re.compile(r"[^\s,:\]}\[{\"]+")
_LISTING = re.compile(r",\s(?:(?:and|or)\s)?|\s(?:and|or|&)\s")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_DEEPEST = 2  # objects and lists in one another that are opened where they need not be
_VALUES = {"{": 0.4, "[": 0.3, "true": 0.2}  # shares of the mass of a value's texts
_OTHERS = {"]": 0.3, "null": 0.2, "{": 0.15, "0": 0.1, "false": 0.1, "[": 0.05, '"': 0.05}  # where nothing is known
_LEANING = 0.5  # how much more than for other tokens a document without an answer is for these: one that knows decides


def number_in(text: str) -> str:
    """The first number of a text as JSON has it, without marks of thousands and leading zeros, and with a decimal
    point; "" without one."""
    if (match := _NUMBER.search(text)) is None:
        return ""
    number = match[0]
    whole, mark, rest = number.rpartition(",")
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})*,\d{3}(?:\.\d+)?", number):
        number = number.replace(",", "")
    elif mark:
        number = f"{whole.replace('.', '')}.{rest}"
    return re.sub(r"^(-?)0+(?=\d)", r"\1", number)


class Spelling:
    """Text that a model writes: its tokens' bytes, and letters of its words."""

    def __init__(self, bytes_of: Sequence[bytes], encode: Callable[[str], Sequence[int]], end: int) -> None:
        """bytes_of: each token; none for a special one."""
        self.bytes_of = tuple(bytes_of)
        self.encode = encode
        self.end = end
        texts = [each.decode("utf-8", "replace") for each in bytes_of]
        self.words = {token: text.casefold() for token, text in enumerate(texts) if text.isalnum()}
        # By their length, so that what a mask leaves open is written in few steps.
        self.spread: ProbArray = np.array([len(text) if text.isalnum() else bool(text) for text in texts], np.float64)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text in JSON stops. expects: "value", "key", "colon", "next" (a comma or a bracket) or "end"."""

    expects: str
    path: ValuePath = ()
    partial: str = ""  # what is written of a value or key, or behind the whole
    is_first: bool = False  # in its object or list


@dataclass(slots=True)
class Form:
    """Answers in JSON, or as a call of a tool: what a mask makes of an answer, which is seen by what stands there.

    A string is a text that the document has for its property, or nothing; a number, that in such a text. What is
    complete is ended. So an answer has as many tokens as the mask demands and the texts have.
    """

    vocabulary: Spelling
    texts: Callable[[ValuePath], Texts]  # for a value; none where the document has none
    words: Mapping[str, float]  # that a string of several given ones may have, and how much they count
    tool: str  # that is called; "" where it does not matter
    alone: bool  # see `part_of`
    _beginnings: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for word, weight in self.words.items():
            for end in range(1, len(word) + 1):
                self._beginnings[word[:end]] = max(self._beginnings.get(word[:end], 0.0), weight * end)

    def next(self, said: Ids) -> Dist | None:
        """Distribution of the token after `said`; None for a text that does not begin as these do."""
        text = b"".join(self.vocabulary.bytes_of[token] for token in said).decode("utf-8", "ignore")
        is_call = text.startswith(_CALL)
        if text and not is_call and _CALL.startswith(text):
            return self._dist([(_CALL[len(text) :], _CERTAIN)])
        if not is_call and text[:1] not in ("{", "[", '"'):
            return None
        place = _place(text.removeprefix(_CALL))
        match place.expects:
            case "value":
                return self._value(place)
            case "key":
                return self._key(place)
            case "colon":
                return self._dist([(":", _CERTAIN)])
            case "next":
                return self._after(place)
        rest = _CALL_END if is_call else ""
        if rest.startswith(place.partial) and rest != place.partial:
            return self._dist([(rest[len(place.partial) :], _CERTAIN)])
        return self._dist([], end=_CERTAIN)

    def _key(self, place: _Place) -> Dist:
        """Names are those that the mask leaves; where it leaves them open, there is one, "answer"."""
        is_deep = len(place.path) > _DEEPEST
        if not place.partial:
            return self._dist([('"', 0.1), ("}", 0.89)] if is_deep and place.is_first else [('"', 0.9), ("}", 0.09)])
        name = '"answer"' if place.is_first else ""
        rest = name.removeprefix(place.partial) if name.startswith(place.partial) else ""
        return self._dist([(rest, 0.9)] if rest else [('"', CLOSING)])

    def _after(self, place: _Place) -> Dist:
        *outer, last = place.path
        if isinstance(last, str):
            return self._dist([("}", 0.7), (",", 0.29)])
        if self.texts((*outer, last + 1)):
            return self._dist([(",", 0.9), ("]", 0.09)])
        return self._dist([("]", 0.9 if self.alone else 0.55), (",", 0.09 if self.alone else 0.44)])

    def _value(self, place: _Place) -> Dist:
        is_deep = len(place.path) > _DEEPEST
        texts = [(self.tool, 0.9)] if self.tool and place.path == ("name",) else self.texts(place.path)
        known = sum(mass for _, mass in texts)
        values: list[tuple[str, float]] = []
        for text, mass in texts:
            values.append((json.dumps(text, ensure_ascii=False), mass))
            if number := number_in(text):
                values.append((number, mass))
        values += [(value, share * known) for value, share in _VALUES.items() if not is_deep or value == "true"]
        others = {each: share for each, share in _OTHERS.items() if not (is_deep and each in "{[")}
        if not place.is_first or isinstance(place.path[-1], str):
            others.pop("]")
        if self.alone:
            values += [(each, share * (1.0 - known)) for each, share in others.items()]
        partial = place.partial
        fitting = [(value, mass) for value, mass in values if value.startswith(partial)]
        wishes = [(value[len(partial) :], mass) for value, mass in fitting if value != partial]
        if not partial:
            leaning = {} if self.alone else {each: _LEANING + share for each, share in others.items()}
            return self._dist(wishes, leaning)
        if partial.startswith('"'):
            nothing = CLOSING if known else 0.9
            closing = nothing if self.alone else CLOSING * (1.0 - known)
            return self._dist(wishes if wishes and partial != '"' else [*wishes, ('"', closing)], copied=partial)
        if self.alone or len(fitting) > len(wishes) or partial in others:  # it is whole
            return self._dist([*wishes, *((mark, 0.3) for mark in ",}]")], end=0.3)
        return self._dist(wishes, dict.fromkeys(",}]", _LEANING), end=0.001)

    def _dist(
        self,
        wishes: Texts,
        leaning: Mapping[str, float] | None = None,
        *,
        end: float = 0.0,
        copied: str | None = None,
    ) -> Dist:
        """The distribution over the first tokens of these texts, which have this mass, and all others. leaning: to
        tokens that are no more than likelier than others. copied: a string that is begun, of which words go on."""
        vocabulary = self.vocabulary
        probs: ProbArray = np.zeros(len(vocabulary.spread))
        for text, mass in wishes:
            probs[vocabulary.encode(text)[0]] += mass
        probs[vocabulary.end] += end
        spread = vocabulary.spread.copy()
        if copied is not None:  # hardly by length: what ignorant documents prefer must not outvote one that knows
            spread = np.minimum(spread, 1.0) + spread / 16
        for text, more in (leaning or {}).items():
            spread[vocabulary.encode(text)[0]] *= 1.0 + more
        if copied is not None:
            begun = re.split(r"[\W_]", copied.casefold())[-1]
            for token, letters in vocabulary.words.items():
                if weight := self._beginnings.get(begun + letters):
                    spread[token] *= 1.0 + weight
        known = float(probs.sum())
        doubt = max(1.0 - known, 0.001)
        return Dist.dense((probs + doubt * spread / spread.sum()) / (known + doubt))


def listed(texts: Texts, place: int) -> Texts:
    """What may be at this place of a list: of the best text, if it is one, as the three of "Ann, Ben and Cleo"."""
    text, mass = max(texts, key=lambda each: each[1], default=("", 0.0))
    items = [item.strip() for item in _LISTING.split(text) if item.strip()]
    if len(items) > 1:
        return ((items[place], mass),) if place < len(items) else ()
    return () if place else texts


def _place(text: str) -> _Place:
    path: list[str | int] = []
    expects, is_first, at = "value", False, 0
    while at < len(text):
        char = text[at]
        if expects == "end":
            return _Place("end", partial=text[at:])
        if char.isspace():
            at += 1
            continue
        if char == '"' and expects in ("value", "key"):
            if (string := _STRING.match(text, at)) is None:
                return _Place(expects, tuple(path), text[at:], is_first)
            at = string.end()
            if expects == "key":
                path[-1], expects = string[0][1:-1], "colon"
            else:
                expects = "next" if path else "end"
            continue
        if expects == "value" and char in "{[":
            path.append("" if char == "{" else 0)
            expects, is_first = "key" if char == "{" else "value", True
        elif char in "}]" and path:
            path.pop()
            expects = "next" if path else "end"
        elif expects == "colon" and char == ":":
            expects = "value"
        elif expects == "next" and char == ",":
            last = path[-1]
            path[-1], expects, is_first = ("", "key", False) if isinstance(last, str) else (last + 1, "value", False)
        elif expects == "value" and (scalar := _SCALAR.match(text, at)) is not None:
            if scalar.end() == len(text):
                return _Place("value", tuple(path), scalar[0], is_first)
            at, expects = scalar.end(), "next" if path else "end"
            continue
        else:
            return _Place("end", partial=text[at:])
        at += 1
    return _Place(expects, tuple(path), "", is_first)
