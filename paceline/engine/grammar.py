"""Constraints compiled for one vocabulary, by llguidance: JSON of a schema, any JSON object, calls of tools.

A mask is exact: a token is allowed if its bytes can go on to a text that keeps the constraint, whichever way that text
is cut into tokens. White space is bounded (at most one blank behind a comma or colon), so that no model, however bad,
can fill an answer with it. The only module that knows llguidance.

Not handled: limits on the length of an answer; a constraint is cut off by `max_tokens` like any text.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from paceline.core.constraint import MAX_TEXT, Constraint, ConstraintKind, Mask
from paceline.engine.contract import TextModel
from paceline.errors import RequestError

log = logging.getLogger("paceline.grammar")

KEPT = 64  # compiled constraints
MAX_REMAINDERS = 50_000  # a second of compiling
# Of llguidance's JSON: what Python's json.dumps and what JSON.stringify write.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# `no_forcing`: else, where only one text can follow, only one way to cut it into tokens would be allowed.
_HEAD = '%llguidance {"no_forcing": true}\n'
_PARAM: dict[ConstraintKind, str] = {
    "json_object": "response_format",
    "json_schema": "response_format",
    "tools": "tools",
}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Grammars:
    """Of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: TextModel) -> None:
        self._model = tokenizer
        self._ends = frozenset(end for end in tokenizer.eos_ids if 0 <= end < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # fresh ones, to be copied

    def warm(self) -> None:
        """Read the vocabulary: about a second for 152,000 tokens, in which no other thread runs."""
        with self._lock:
            if self._vocabulary is None and self._ends:
                self._vocabulary = _vocabulary(self._model, self._ends)

    def mask(self, constraint: Constraint) -> GrammarMask:
        """A mask of its own for one answer. Blocks while the constraint is compiled, up to about a second.

        Raises RequestError, naming the request's field, for one that cannot be kept.
        """
        with self._lock:
            known = self._compiled.get(constraint)
            if known is not None:
                self._compiled.move_to_end(constraint)
                return GrammarMask(known.deep_copy(), self._model.vocab_size, self._ends)
        self.warm()
        fresh = self._compile(constraint)
        with self._lock:
            self._compiled[constraint] = fresh
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return GrammarMask(fresh.deep_copy(), self._model.vocab_size, self._ends)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        param = _PARAM[constraint.kind]
        if self._vocabulary is None:
            raise RequestError("This model has no end-of-text token, so no answer can be held to a form.", param=param)
        if len(constraint.text) > MAX_TEXT:
            what = "schema" if constraint.kind == "json_schema" else "tools"
            raise RequestError(f"The {what} may have {MAX_TEXT} characters at most.", param=param, code="too_large")
        try:
            text = _grammar(constraint)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(f"This is not a JSON Schema: {error}", param=param) from error
        matcher = LLMatcher(self._vocabulary, text, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one may take 30 ms; copies of the matcher have it from here
        if matcher.is_error():
            reason = _sentence(matcher.get_error())
            if constraint.kind == "tools" and "content" in (asked := json.loads(constraint.text)):
                self._compile(Constraint("json_schema", json.dumps(asked["content"])))  # raises, if it is to blame
            raise RequestError(f"This schema cannot be kept to: {reason}.", param=param, code="invalid_json_schema")
        return matcher


class GrammarMask:
    """`core.constraint.Mask` on a matcher that walks from path to path by way of what they have in common."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        """matcher: its own, at the beginning."""
        self._fresh, self._matcher = matcher.deep_copy(), matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._consumed: list[int] = []
        self._nothing = np.zeros(vocab_size, dtype=np.bool_)
        self._nothing.flags.writeable = False

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """See `Mask`. 15 us and a microsecond for each token that is new, at 152,000 tokens; then 60 us for the array.

        Nothing, too, where the text has become too intricate for llguidance's limits.
        """
        bits = self._matcher.compute_bitmask() if self._walk(list(path)) else None
        if self._matcher.is_error():
            log.warning("a constraint cannot be kept any further: %s", _sentence(self._matcher.get_error()))
            self._matcher, self._consumed = self._fresh.deep_copy(), []
            return self._nothing
        if bits is None:
            return self._nothing
        packed = np.frombuffer(bits, dtype=np.uint8)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def complete(self, path: Sequence[int]) -> bool:
        """May the answer end here?"""
        return any(self.allowed(path)[end] for end in self._ends)

    def _walk(self, tokens: list[int]) -> bool:
        """Bring the matcher to that path. False if the path breaks the constraint, or has an end in it."""
        common = _common(self._consumed, tokens)
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            self._matcher.compute_bitmask()  # else llguidance 1.9 may give the mask of the branch that was left
            del self._consumed[common:]
        new = tokens[common:]
        if not self._ends.isdisjoint(new) or (new and not 0 <= min(new) <= max(new) < self._vocab_size):
            return False
        taken = self._matcher.try_consume_tokens(new)
        self._consumed += new[:taken]
        return taken == len(new)


class PromisedMask:
    """A mask that is still being compiled while its answer's documents are looked for."""

    def __init__(self) -> None:
        self._mask: Mask | None = None

    def keep(self, mask: Mask) -> None:
        self._mask = mask

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        assert self._mask is not None, "a machine has no law to mask before its prompts are there"
        return self._mask.allowed(path)

    def complete(self, path: Sequence[int]) -> bool:
        assert self._mask is not None, "nothing has been written yet"
        return self._mask.complete(path)


def _common(known: list[int], tokens: list[int]) -> int:
    """Length of the common beginning; by halves, since comparing slices is fast."""
    low, high = 0, min(len(known), len(tokens))
    if known[:high] == tokens[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if known[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- the vocabulary -------------------------------------------------------------------------------------------------
class _Vocabulary:
    """What llguidance asks of a tokenizer. Tokens without bytes are special to it: no grammar here names them."""

    def __init__(self, model: TextModel, ends: frozenset[int]) -> None:
        self.tokens = [model.token_bytes(token) for token in range(model.vocab_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text or token in ends]
        for token in self.special_token_ids:
            self.tokens[token] = b"<|%d|>" % token
        self.eos_token_id = min(ends)
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        del text  # only forced text would be cut into tokens, and nothing is forced
        return []


def _vocabulary(model: TextModel, ends: frozenset[int]) -> LLTokenizer:
    wrapper = TokenizerWrapper(_Vocabulary(model, ends))
    return LLTokenizer(wrapper, n_vocab=model.vocab_size, eos_token=sorted(ends))


# ---- grammars, in llguidance's dialect of Lark ----------------------------------------------------------------------
def _grammar(constraint: Constraint) -> str:
    """Raises ValueError, KeyError or TypeError for a text that is not what `Constraint` says."""
    match constraint.kind:
        case "json_object":
            return f"{_HEAD}start: {_json({'type': 'object'})}\n"
        case "json_schema":
            return f"{_HEAD}start: {_json(_read(constraint.text))}\n"
        case "tools":
            return _tools(_read(constraint.text))


def _read(text: str) -> dict[str, object]:
    """Refuses what would take too long: a number's remainder is followed by as many states as it can have."""
    read = _object(json.loads(text))
    remainders = math.lcm(*_divisors(read))
    if remainders > MAX_REMAINDERS:
        raise ValueError(f"the least common multiple of its multipleOf is {remainders}, more than {MAX_REMAINDERS}")
    return read


def _divisors(value: object) -> Iterator[int]:
    """What stands behind multipleOf, without the decimal point."""
    if isinstance(value, dict):
        divisor = value.get("multipleOf")
        if isinstance(divisor, int | float) and math.isfinite(divisor) and divisor > 0:
            digits, exponent = Decimal(str(divisor)).as_tuple()[1:]
            yield int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _divisors(inner)


def _json(schema: Mapping[str, object]) -> str:
    """A part of its own: references in a schema count from its own root."""
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"


def _tools(asked: Mapping[str, object]) -> str:
    """Text, then calls, then the end; without `required` either may be missing. As Qwen2.5 and Hermes write calls."""
    tools = asked["tools"]
    if not isinstance(tools, list) or not tools:
        raise ValueError("there are no tools")
    lines: list[str] = []
    for place, tool in enumerate(tools):
        name, parameters = str(tool["name"]), _parameters(tool.get("parameters"))
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines += [f'tool_{place}: {begin} arguments_{place} "}}"', f"arguments_{place}: {_json(parameters)}"]
    lines.append("call: " + " | ".join(f"tool_{place}" for place in range(len(tools))))
    first = f'"\\n" call "\\n{_CLOSE}"'
    more = f' ("\\n{_OPEN}\\n" call "\\n{_CLOSE}")*' if asked["parallel"] else ""
    if asked["required"]:
        lines.append(f'start: "{_OPEN}" {first}{more}')
    elif asked.get("content") is not None:
        lines += [f'start: content | "{_OPEN}" {first}{more}', f"content: {_json(_object(asked['content']))}"]
    else:
        # The lazy lexeme ends at the first opening mark, so no text goes on behind one that is not a call.
        lines += [
            f"start: TEXT | open {first}{more}",
            f'open[lazy]: /(.|\\n)*/ "{_OPEN}"',
            "TEXT: /(.|\\n)*/",
        ]
    return _HEAD + "\n".join(lines) + "\n"


def _parameters(schema: object) -> dict[str, object]:
    """A function without any takes an empty object; arguments are an object in any case."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **_object(schema)}


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object, not {json.dumps(value)[:80]}")
    return value


def _sentence(error: str) -> str:
    """The first line of what llguidance says, without the place in a grammar that the client never saw.

    Of what is wrong with a pattern the last line tells.
    """
    lines = error.strip().partition("\n<state>")[0].splitlines() or ["for no reason that is known"]
    _, found, rest = lines[0].partition("failed to compile JSON schema: ")
    first = rest if found else lines[0]
    return (f"{first} {lines[-1].strip()}" if first.endswith(":") else first).rstrip(".")[:500]
