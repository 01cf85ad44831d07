"""How models write calls of tools, as data: the text before, between and behind name and arguments, by the family that
a chat template shows. Calls are enforced (`grammar.json_schema`), parsed and written into prompts by the same data.

A call is `head`, name, `middle`, arguments, `tail`; calls stand between `begin` and `end`, with `between` among them.
Arguments are a JSON object, or parameters in tags, each a text of its own (`tagged`).

Not handled: calls of Python, as Llama 4 writes them; ids of calls, as Mistral's of one release and Kimi's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls."""

    name: str
    signs: tuple[str, ...]  # all of them stand in a template of this family
    mark: str  # a call begins where it stands
    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    many: bool = True  # several calls may stand in one answer
    alone: bool = False  # the mark is one at the beginning of an answer only
    tagged: bool = False  # parameters in tags

    @property
    def opening(self) -> str:
        """From the mark on, up to the first name."""
        return self.begin + self.head

    @property
    def text(self) -> str:
        """All of its marks: tokens that are special elsewhere are text where they stand in it."""
        return "".join((self.begin, self.head, self.middle, self.tail, self.between, self.end))

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them. calls: name and JSON of the arguments of each."""
        texts = (
            f"{self.head}{name if self.tagged else json.dumps(name, ensure_ascii=False)[1:-1]}{self.middle}"
            f"{self._arguments(given)}{self.tail}"
            for name, given in calls
        )
        return self.begin + self.between.join(texts) + self.end

    def _arguments(self, given: str) -> str:
        values = json.loads(given) if self.tagged else None
        if not isinstance(values, Mapping):
            return given
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        return "".join(f"{TAG}{key}{TAG_END}{text}{CLOSING}" for key, text in texts.items())


TAG, TAG_END, CLOSING = (
    "<parameter=",
    ">\n",
    "\n</parameter>\n",
)  # around a tagged parameter's name, and behind its text

HERMES: Final = ToolFormat(
    "hermes",
    ("<tool_call>",),
    "<tool_call>",
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
)
"""Of Hermes, Qwen2.5 and Qwen3; for models whose template shows no other."""
FORMATS: Final = (
    ToolFormat(  # Qwen3-Coder, Qwen3.5
        "qwen3_coder",
        ("<tool_call>", "<function="),
        "<tool_call>",
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        tagged=True,
    ),
    HERMES,
    ToolFormat(
        "llama3",
        ('"parameters": ', "<|start_header_id|>"),
        "{",
        '{"name": "',
        '", "parameters": ',
        "}",
        many=False,
        alone=True,
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", between=""),
    ToolFormat(  # earlier releases
        "mistral_list",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        '{"name": "',
        '", "arguments": ',
        "}",
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
    ),
    ToolFormat(  # DeepSeek-V3, R1
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "```json"),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "deepseek_v31",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    ),
)
BY_NAME: Final = {each.name: each for each in FORMATS}


def texts_of(schema: Mapping[str, object]) -> list[str] | None:
    """The texts that a tagged parameter may have, [] for any; None where it is JSON."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    if texts and texts == values:
        return texts
    return [] if schema.get("type") == "string" and "enum" not in schema and "const" not in schema else None


def format_of(template: str) -> ToolFormat:
    """The format of a model by its chat template."""
    return next((each for each in FORMATS if all(sign in template for sign in each.signs)), HERMES)
