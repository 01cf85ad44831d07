"""What an answer must look like, as the request says it, and the masks over the vocabulary that hold it to that.

A mask depends on the tokens of a path alone, so both sides know it for every draft, and a path that is given up needs
nothing undone. Grammars themselves are compiled elsewhere (`engine.grammar.compiler`); this module knows only what they
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

ConstraintKind = Literal["json_object", "json_schema", "loose_schema", "tools"]
MAX_TEXT = 262_144  # characters of a constraint's text


@dataclass(frozen=True, slots=True)
class Constraint:
    """One for the whole answer.

    text: nothing for `json_object`; the schema as JSON for `json_schema`, which is kept to the letter or refused, and
    `loose_schema`, of which what cannot be kept is left out; for `tools` a JSON object `{"tools": [{"name",
    "parameters", "strict": bool}], "required": bool, "parallel": bool}`: text that may hold, or must be (`required`),
    calls `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, one or, if `parallel`, several. With a
    schema under the key `content` (to the letter if `content_strict`), text without calls is JSON of it, and no text
    stands before calls.
    """

    kind: ConstraintKind
    text: str = ""


class Mask(Protocol):
    """The compiled constraint of one answer."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """(vocab_size,) which tokens may follow these output tokens, end-of-text ids included; None: all of them.

        A path that itself breaks the constraint has no followers: nothing is allowed. It must not raise.
        """

    def complete(self, path: Sequence[int]) -> bool:
        """Does the constraint allow the answer to end here?"""
