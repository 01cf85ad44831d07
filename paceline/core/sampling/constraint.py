"""Structured output: the constraint of a request, and the interface of its masks over the vocabulary.

A mask depends on the tokens of a path alone, so both sides can compute it for every draft, and rolling back a path
needs no undo. Grammars are compiled in `engine.grammar.compiler`; this module knows only the interface of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

ConstraintKind = Literal["json_object", "json_schema", "loose_schema", "tools"]
MAX_TEXT = 262_144  # characters of a constraint's text


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the whole answer.

    text: empty for `json_object`; a schema as JSON for `json_schema` (enforced exactly or refused) and `loose_schema`
    (what cannot be enforced is ignored); for `tools` a JSON object `{"tools": [{"name", "parameters", "strict": bool}],
    "required": bool, "parallel": bool}`. With `tools` the answer may contain, or must be (`required`), calls
    `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`: one, or several if `parallel`. With a schema
    under the key `content` (enforced exactly if `content_strict`), an answer without calls is JSON of that schema, and
    no text precedes calls.
    """

    kind: ConstraintKind
    text: str = ""


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
