"""Structured output: the constraint of a request, and the interface of its masks over the vocabulary.

A mask depends on the tokens of a path alone, so both sides can compute it for every draft, and rolling back a path
needs no undo. Grammars are compiled in `engine.grammar.compiler`; this module knows only the interface of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

ConstraintKind = Literal["text", "json_object", "json_schema", "loose_schema", "tools", "regex", "choice", "grammar"]
MAX_TEXT = 262_144  # characters of a constraint's text
MAX_STOP_IDS = 1024


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the whole answer.

    text: empty for `json_object`; a schema as JSON for `json_schema` (enforced exactly or refused) and `loose_schema`
    (what cannot be enforced is ignored); a pattern for `regex`, which the whole answer matches; a JSON list of strings
    for `choice`; a grammar in Lark or GBNF for `grammar`; empty for `text`, which has no form. For `tools` a JSON
    object `{"tools": [{"name", "parameters", "strict": bool}], "required": bool, "parallel": bool}`. With `tools` the
    answer may contain, or must be (`required`), calls `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`:
    one, or several if `parallel`. With another constraint under the key `content`, `{"kind", "text"}`, an answer
    without calls keeps to that, and no text precedes calls.
    """

    kind: ConstraintKind
    text: str = ""
    min_tokens: int = 0  # before which the answer does not end, unless its form lets nothing else follow
    ignore_eos: bool = False  # likewise it never ends by an end-of-text token
    stop_ids: tuple[int, ...] = ()  # that end it as well; needed with `min_tokens` only
    param: str = field(default="", compare=False)  # the request's field that asks for the form; empty: as `kind` says


class Mask(Protocol):
    """The compiled constraint of one answer."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """(vocab_size,) mask of the tokens that may follow these output tokens, end-of-text ids included; None: all.

        For a path that breaks the constraint itself no token is allowed. Must not raise.
        """

    def complete(self, path: Sequence[int]) -> bool:
        """True if the answer may end after `path`."""

    def at_once(self, work: Callable[[], T]) -> T:
        """Do this, which asks for several masks and changes nothing that others see: where masks are computed on a
        thread, all of it is done there."""
