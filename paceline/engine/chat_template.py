"""Chat templates rendered: Jinja programs that come with a model's weights, in a sandbox, by what such programs expect.

What they expect is what transformers gives them, whose renderer this one equals and does not import: blocks without
their lines' blanks, `break` and `continue`, JSON that is not escaped for HTML, today's date, a way to refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MARK: Final = "HERE_THE_ANSWER_GOES_ON "  # ends with a blank, so that a template that trims texts is found out
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")  # names of a message's, the present one first


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError for a template that is none."""
        self.source = source
        self._compiled = _environment().from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object], *, continues: bool = False
    ) -> str:
        """The conversation up to where the next answer begins; continues: up to the end of its last message's text.

        content of messages: text, or a list of parts. Raises whatever the template does, among it jinja2.TemplateError
        where it refuses, and ValueError where it shows the last message's text otherwise or not at all.
        """
        if continues and "content" not in self.source:
            raise ValueError("the template shows no message's text")
        shown = [_with_reasoning(message) for message in _plain(messages)]
        text = _marked(shown[-1]) if continues and shown else ""
        given = _plain(variables)
        rendered = self._compiled.render(
            messages=shown, tools=None, documents=None, add_generation_prompt=not continues, **given
        )
        if not continues:
            return rendered
        mark = _MARK.strip()
        if mark not in rendered or text.strip() not in rendered:
            raise ValueError("the template does not show the message that is to go on")
        at = rendered.rindex(mark)
        return rendered[:at] if rendered[at:].startswith(_MARK) else rendered[:at].rstrip()


def _plain(value: Any) -> Any:
    """A copy of numbers, texts, lists and dicts alone: objects have methods that a sandbox knows nothing of."""
    return json.loads(json.dumps(value, default=lambda other: f"<{type(other).__name__}>"))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning is under the names that templates of today read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(message: dict[str, Any]) -> str:
    """Put the mark behind the message's text, the last part of it; return that text without it."""
    content = message["content"]
    held, key = (message, "content") if isinstance(content, str) else (content[-1], "text")
    text: str = held[key]
    held[key] = text + _MARK
    return text


class _Generation(Extension):
    """`{% generation %}`, which marks an answer for training, and of which the text alone counts here."""

    tags = {"generation"}  # noqa: RUF012  # the library's attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """`namespace()`, which takes no name that may lead out of the sandbox."""

    def __init__(*args: Any, **named: Any) -> None:  # `namespace(self=1)` is allowed
        for name in dict(*args[1:], **named):
            _check(name)
        Namespace.__init__(*args, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r}")


class _Dicts:
    """`dict()`, and nothing else that a class has."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _json
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dicts(),
        "namespace": _Names,
    }
    return made
