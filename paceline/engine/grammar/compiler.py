"""Constraints compiled for one vocabulary, by llguidance: JSON of a schema, any JSON object, calls of tools.

A mask is exact: a token is allowed if its bytes can go on to a text that keeps the constraint, whichever way that text
is cut into tokens. White space is bounded (at most one blank behind a comma or colon), so that no model, however bad,
can fill an answer with it. The only module that calls llguidance; `dialect` writes what it reads.

Of a schema that is not strict the mask keeps what it can: keywords and formats that llguidance does not know are left
out, `oneOf` is `anyOf`, and where that is not enough patterns and bounds of numbers go, too.

Not handled: limits on the length of an answer; a constraint is cut off by `max_tokens` like any text.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from paceline.core.sampling.constraint import MAX_TEXT, Constraint, ConstraintKind, Mask
from paceline.engine.base import TextModel
from paceline.engine.grammar.lark import content_of, grammar
from paceline.errors import RequestError

log = logging.getLogger("paceline.grammar")

KEPT = 64  # constraints, compiled or refused
_PARAM: dict[ConstraintKind, str] = {
    "json_object": "response_format",
    "json_schema": "response_format",
    "loose_schema": "response_format",
    "tools": "tools",
}


class GrammarCompiler:
    """Of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: TextModel) -> None:
        self._model = tokenizer
        self._ends = frozenset(end for end in tokenizer.eos_ids if 0 <= end < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[Constraint, LLMatcher | RequestError] = OrderedDict()  # to be copied

    def warm(self) -> None:
        """Read the vocabulary: about a second for 152,000 tokens, in which no other thread runs."""
        with self._lock:
            if self._vocabulary is None and self._ends:
                self._vocabulary = _vocabulary(self._model, self._ends)

    def mask(self, constraint: Constraint) -> GrammarMask:
        """A mask of its own for one answer. Blocks while the constraint is compiled, up to about a second.

        Raises RequestError, naming the request's field, for one that cannot be kept.
        """
        param = _PARAM[constraint.kind]
        if len(constraint.text) > MAX_TEXT:
            what = "tools" if constraint.kind == "tools" else "schema"
            raise RequestError(f"The {what} may have {MAX_TEXT} characters at most.", param=param, code="too_large")
        with self._lock:
            known = self._known.get(constraint)
            if known is not None:
                self._known.move_to_end(constraint)
        if known is None:
            self.warm()
            if self._vocabulary is None:
                raise RequestError("This model has no end-of-text token: no answer can be held to a form.", param=param)
            known = self._compiled(constraint, self._vocabulary)
            with self._lock:
                self._known[constraint] = known
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
        if isinstance(known, RequestError):
            raise copy.copy(known)  # its own for each who asks: an error gathers where it was raised
        with self._lock:
            return GrammarMask(known.deep_copy(), self._model.vocab_size, self._ends)

    def _compiled(self, constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher | RequestError:
        param = _PARAM[constraint.kind]
        try:
            text = grammar(constraint, lambda _: True)
            matcher = _matcher(vocabulary, text)
            if matcher.is_error():
                looser = grammar(constraint, lambda part: not _matcher(vocabulary, part).is_error())
                matcher = matcher if looser == text else _matcher(vocabulary, looser)
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            return RequestError(f"This is not a JSON Schema: {error}", param=param)
        if not matcher.is_error():
            return matcher
        if constraint.kind == "tools" and (content := content_of(constraint)) is not None:
            blamed = self._compiled(content, vocabulary)
            if isinstance(blamed, RequestError):
                return blamed
        reason = _sentence(matcher.get_error())
        return RequestError(f"This schema cannot be kept to: {reason}.", param=param, code="invalid_json_schema")


class GrammarMask:
    """`core.sampling.constraint.Mask` on a matcher that walks from path to path by way of what they have in common."""

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


class DeferredMask:
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


# ---- llguidance ------------------------------------------------------------------------------------------------------
def _matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """At its beginning. The first mask may take 30 ms; copies of the matcher have it from here."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _sentence(error: str) -> str:
    """The first line of what llguidance says, without the place in a grammar that the client never saw.

    Of what is wrong with a pattern a later line tells. What it says of itself is put in words.
    """
    if error.startswith("panic"):
        return "it is too large"
    if error.startswith("NoExtension"):
        return "no text fits it, as where a reference leads to itself"
    lines = error.strip().partition("\n<state>")[0].splitlines() or ["for no reason that is known"]
    _, found, rest = lines[0].partition("failed to compile JSON schema: ")
    first = rest if found else lines[0]
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    return f"{first} {why}".strip().rstrip(".")[:500]
