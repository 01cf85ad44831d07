"""Constraints compiled for one vocabulary by llguidance: JSON of a schema, any JSON object, tool calls, a pattern, one
of several texts, a grammar; and when an answer may end.

A mask is exact: a token is allowed iff its bytes can be continued to a text that satisfies the constraint, for any
tokenisation of that text. White space is bounded (at most one blank after a comma or colon), so that no model can fill
an answer with it; and where a model repeats itself without end in a string or a number of JSON, only its end is allowed
(`REPEATS`). The only module that has llguidance compile; `json_schema` prepares the schemas.

A schema that is not strict is relaxed where necessary: keywords and formats that llguidance does not support are
ignored, `oneOf` becomes `anyOf`, and if that is not enough, patterns and bounds of numbers are removed.

Not handled: limits on the length of an answer; `max_tokens` cuts off constrained text like any other.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from paceline.core.batching.segment import common_length
from paceline.core.sampling.sampler import MAX_TEXT, Constraint, ConstraintKind, Mask
from paceline.engine.base import TextModel
from paceline.engine.families import BY_NAME, HERMES, ThinkingMask, ToolFormat
from paceline.engine.grammar.json_schema import TooLarge, content_of, grammar
from paceline.errors import RequestError

T = TypeVar("T")

log = logging.getLogger("paceline.grammar")

MAX_CACHED = 64  # constraints, compiled or refused, each for its owner
# Processor time after which no further part is tried; one takes about 1 s at most. A machine of half the speed refuses
# schemas of half the cost.
MAX_COMPILE_S = 2.0
# The work of a mask is bounded, since others wait for threads (`bench/LOG.md`): 6,000 items suffice for MAX_OPTIONAL
# properties, and 80,000 of fuel for 200 patterns as alternatives. An answer whose constraint needs more ends there.
_LIMITS = LLParserLimits(step_max_items=6_000, step_lexer_fuel=80_000, verbose_errors=False)
# Times in a row that a short period of tokens may stand in a string or number of JSON; half of it a long one.
REPEATS = 32
SHORT_PERIOD = 8  # tokens
MAX_PERIOD = 32  # tokens: a sentence
_NAMES: dict[ConstraintKind, str] = {"regex": "pattern", "choice": "list of choices", "grammar": "grammar"}  # no JSON


class GrammarCompiler:
    """Compiler for the vocabulary of one model, with a cache. Thread-safe."""

    def __init__(self, tokenizer: TextModel) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(token for token in tokenizer.eos_ids if 0 <= token < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        # Matchers are at the beginning, to be copied.
        # By owner and form: what another one has had compiled is told by no time.
        self._cache: OrderedDict[tuple[str, Constraint], tuple[LLMatcher, _Ends | None] | RequestError] = OrderedDict()
        self._ends: _Ends | None = None

    def warm(self) -> None:
        """Load the vocabulary: about a second for 152,000 tokens, with the GIL held."""
        with self._lock:
            if self._vocabulary is None and self._eos_ids:
                texts = _Vocabulary(self._tokenizer, self._eos_ids)
                self._ends = _Ends(texts.tokens)
                ends = sorted(self._eos_ids)
                self._vocabulary = LLTokenizer(TokenizerWrapper(texts), n_vocab=len(texts.tokens), eos_token=ends)

    def known(self, constraint: Constraint, owner: str = "") -> Mask | None:
        """A new mask for one answer, if the constraint was compiled for this owner before. Raises as `mask` does."""
        form = Constraint(constraint.kind, constraint.text)
        if form.kind == "text":
            return self._whole(None, constraint)
        with self._lock:
            cached = self._cache.get((owner, form))
            if cached is None:
                return None
            self._cache.move_to_end((owner, form))
        return self._made(constraint, cached)

    def _made(self, constraint: Constraint, compiled: tuple[LLMatcher, _Ends | None] | RequestError) -> Mask:
        if isinstance(compiled, RequestError):
            fault = copy.copy(compiled)  # for each caller: raising adds a traceback
            fault.param = fault.param if constraint.kind == "tools" else _param(constraint)
            raise fault
        matcher, ends = compiled
        with self._lock:
            mask = GrammarMask(matcher.deep_copy(), self._tokenizer.vocab_size, self._eos_ids, ends)
        return self._whole(mask, constraint)

    def _whole(self, form: GrammarMask | None, constraint: Constraint) -> Mask:
        """The mask of a whole answer, thinking and end included."""
        thinking = constraint.thinking
        mask: Mask | None = form
        if thinking is not None:
            may = constraint.kind == "tools"
            must = may and json.loads(constraint.text).get("required")
            mask = ThinkingMask(form, thinking, self._tokenizer, "must" if must else "may" if may else "no")
        if mask is not None and not (constraint.min_tokens or constraint.ignore_eos):
            return mask
        return EndMask(mask, constraint, self._tokenizer.vocab_size, self._eos_ids)

    def mask(self, constraint: Constraint, owner: str = "") -> Mask:
        """A new mask for one answer. Blocks while the constraint is compiled, for `MAX_COMPILE_S` and one part more.

        Raises RequestError with the request's field for a constraint that cannot be enforced.
        """
        param = _param(constraint)
        if len(constraint.text) > MAX_TEXT:
            what = "tools" if constraint.kind == "tools" else _NAMES.get(constraint.kind, "schema")
            raise RequestError(f"The {what} may have {MAX_TEXT} characters at most.", param=param, code="too_large")
        mask = self.known(constraint, owner)
        if mask is not None:
            return mask
        self.warm()
        if self._vocabulary is None:
            raise RequestError("This model has no end-of-text token: no answer can be held to a form.", param=param)
        compiled = self._compiled(constraint, self._vocabulary, time.thread_time() + MAX_COMPILE_S)
        with self._lock:
            self._cache[owner, Constraint(constraint.kind, constraint.text)] = compiled
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return self._made(constraint, compiled)

    def _compiled(
        self, constraint: Constraint, vocabulary: LLTokenizer, end: float
    ) -> tuple[LLMatcher, _Ends | None] | RequestError:
        """end: of this thread's processor time, when no further part is tried."""
        param = _param(constraint)
        name = _NAMES.get(constraint.kind)
        refused = None if name is None else f"invalid_{constraint.kind}"

        def fits(part: str) -> bool:
            if time.thread_time() > end:
                raise TooLarge("finding out which of its parts can be enforced takes too long")
            return not _matcher(vocabulary, part).is_error()

        try:
            text = grammar(constraint, lambda _: True)
            matcher = _matcher(vocabulary, text)
            if matcher.is_error():
                relaxed = grammar(constraint, fits)
                matcher = matcher if relaxed == text else _matcher(vocabulary, relaxed)
        except TooLarge as error:
            return RequestError(f"This schema cannot be kept to: {error}.", param=param, code="invalid_json_schema")
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            what = "is not a JSON Schema" if name is None else f"{name} cannot be used"
            return RequestError(f"This {what}: {str(error)[:500]}", param=param, code=refused)
        if not matcher.is_error():
            return matcher, None if self._ends is None or constraint.kind in _NAMES else self._ends.of(constraint)
        if constraint.kind == "tools" and (content := content_of(constraint)) is not None:
            compiled = self._compiled(content, vocabulary, end)
            if isinstance(compiled, RequestError):  # the content's schema is at fault, not the tools'
                return compiled
        reason = _sentence(matcher.get_error())
        return RequestError(
            f"This {name or 'schema'} cannot be kept to: {reason}.", param=param, code=refused or "invalid_json_schema"
        )


def _param(constraint: Constraint) -> str:
    """The field of the request that is at fault."""
    return "tools" if constraint.kind == "tools" else constraint.param or "response_format"


_NUMBER = frozenset(bytes((byte,)) for byte in b"0123456789.eE+-")


class _Ends:
    """By what a value of JSON that repeats itself ends, in one vocabulary."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """texts: of each token."""
        self._texts = texts
        self._quotes = np.array([text.startswith(b'"') for text in texts])
        self._beyond = np.array([text[:1] not in _NUMBER for text in texts])  # that do not go on with a number
        self._call: ToolFormat | None = None  # there is plain text up to the first call

    def of(self, constraint: Constraint) -> _Ends:
        """The same for a constraint whose answers are JSON, or calls."""
        options = json.loads(constraint.text) if constraint.kind == "tools" else {}
        ends = copy.copy(self)
        if options and not options.get("required") and options.get("content") is None:
            ends._call = BY_NAME[options.get("format", HERMES.name)]
        return ends

    def after(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Tokens that may end the string or number in which the path repeats itself; None where it does not. Of the
        path alone, so that every side and every draft has the same mask."""
        period = next((n for n in range(1, MAX_PERIOD + 1) if _repeats(path, n)), None)
        if period is None:
            return None
        text = b"".join(self._texts[token] for token in path)
        if self._call is not None:
            mark = self._call.mark.encode()
            before, call, _ = text.partition(mark)
            if not call or (self._call.alone and before.strip()):
                return None
            text = text[len(before) + (0 if self._call.alone else len(mark)) :]
        repeated = b"".join(self._texts[token] for token in path[-_length(period) :])
        opened = _open_string(text)
        if opened is not None:
            return self._quotes if len(text) - opened > len(repeated) else None
        return self._beyond if all(bytes((byte,)) in _NUMBER for byte in repeated) else None


def _length(period: int) -> int:
    """Tokens over which a period may stand."""
    return REPEATS * period if period <= SHORT_PERIOD else max(REPEATS * SHORT_PERIOD, REPEATS // 2 * period)


def _repeats(path: Sequence[int], period: int) -> bool:
    """The path ends with a period of so many tokens, as often as it may stand."""
    length = _length(period)
    if len(path) < length or path[-1] != path[-1 - period]:
        return False
    tail = list(path[-length:])
    return tail[:-period] == tail[period:]


def _open_string(text: bytes) -> int | None:
    """Where the string of JSON begins in whose middle the text ends; None if it ends in none."""
    opened: int | None = None
    for mark in re.finditer(rb'\\.|"', text, re.DOTALL):
        if mark[0] == b'"':
            opened = mark.start() if opened is None else None
    return opened


class EndMask(Mask):
    """A mask that keeps an answer from ending: by any of its ends for some tokens, by an end-of-text token for ever."""

    def __init__(self, form: Mask | None, constraint: Constraint, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """form: what else the answer keeps to. It wins where it lets nothing follow but an end."""
        self._form = form
        self._min_tokens, self._ignore_eos = constraint.min_tokens, constraint.ignore_eos
        self._no_eos = np.ones(vocab_size, dtype=np.bool_)
        self._no_eos[list(eos_ids)] = False
        self._no_end = self._no_eos.copy()
        self._no_end[[token for token in constraint.stop_ids if token < vocab_size]] = False
        for each in (self._no_eos, self._no_end):
            each.flags.writeable = False

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        form = None if self._form is None else self._form.allowed(path)
        early = len(path) < self._min_tokens
        if not (early or self._ignore_eos):
            return form
        going_on = self._no_end if early else self._no_eos
        if form is None:
            return going_on
        kept = form & going_on
        return kept if kept.any() else form

    def complete(self, path: Sequence[int]) -> bool:
        return self._form is None or self._form.complete(path)


class GrammarMask(Mask):
    """`core.sampling.sampler.Mask` on a matcher that moves from path to path, reusing their common prefix."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: frozenset[int], ends: _Ends | None = None) -> None:
        """matcher: at the beginning, owned by the mask. ends: of values of JSON; None: the answer is none."""
        self._ends = ends
        self._fresh, self._matcher = matcher.deep_copy(), matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._consumed: list[int] = []
        self._nothing = np.zeros(vocab_size, dtype=np.bool_)
        self._nothing.flags.writeable = False

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """See `Mask`. At 152,000 tokens: 15 us plus 1 us for each new token of the path, then 60 us for the array.

        Allows no token if the text exceeds llguidance's limits.
        """
        bits = self._matcher.compute_bitmask() if self._walk(list(path)) else None
        if self._matcher.is_error():
            log.warning("a constraint cannot be kept any further: %s", _sentence(self._matcher.get_error()))
            self._matcher, self._consumed = self._fresh.deep_copy(), []
            return self._nothing
        if bits is None:
            return self._nothing
        packed = np.frombuffer(bits, dtype=np.uint8)
        allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        ends = None if self._ends is None else self._ends.after(path)
        if ends is not None and (ended := allowed & ends).any():
            return ended
        return allowed

    def complete(self, path: Sequence[int]) -> bool:
        """True if the answer may end after this path."""
        allowed = self.allowed(path)
        return any(allowed[token] for token in self._eos_ids)

    def _walk(self, tokens: list[int]) -> bool:
        """Bring the matcher to that path. False if the path breaks the constraint, or has an end in it."""
        common = common_length(self._consumed, tokens)
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            self._matcher.compute_bitmask()  # else llguidance 1.9 may give the mask of the branch that was left
            del self._consumed[common:]
        new = tokens[common:]
        if not self._eos_ids.isdisjoint(new) or (new and not 0 <= min(new) <= max(new) < self._vocab_size):
            return False
        taken = self._matcher.try_consume_tokens(new)
        self._consumed += new[:taken]
        return taken == len(new)


class DeferredMask:
    """A mask to be set later: it is compiled while the documents of its answer are retrieved."""

    def __init__(self) -> None:
        self._mask: Mask | None = None

    def keep(self, mask: Mask) -> None:
        self._mask = mask

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        assert self._mask is not None, "the mask is not compiled yet"
        return self._mask.allowed(path)

    def complete(self, path: Sequence[int]) -> bool:
        assert self._mask is not None, "the mask is not compiled yet"
        return self._mask.complete(path)

    def at_once(self, work: Callable[[], T]) -> T:
        assert self._mask is not None, "the mask is not compiled yet"
        return self._mask.at_once(work)


# ---- the vocabulary -------------------------------------------------------------------------------------------------
class _Vocabulary:
    """Texts of all tokens, as llguidance reads them. Those without bytes are special tokens."""

    def __init__(self, tokenizer: TextModel, eos_ids: frozenset[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text or token in eos_ids]
        for token in self.special_token_ids:
            self.tokens[token] = b"<|%d|>" % token
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        del text  # called for forced text only, and nothing is forced
        return []


# ---- llguidance ------------------------------------------------------------------------------------------------------
def _matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning. Its first mask may take 30 ms; it is computed here, for all copies of the matcher."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _sentence(error: str) -> str:
    """First line of llguidance's error, without the position in a grammar that the client never saw.

    For a pattern, the cause is added from a later line. Internal errors are reworded.
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
