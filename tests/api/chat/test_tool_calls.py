"""Tool calls in an answer's text: independent of how it is split, exact in their arguments, no partial mark in the
content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.chat.tools import ParsedOutput, TextOutput, ToolCallArguments, ToolCallParser, ToolCallStart
from paceline.engine.families import BY_NAME, FORMATS, HERMES, ToolFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(['"', "\\", "}", "{", CLOSE, OPEN]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)
NAMES = st.text("Az09_-", min_size=1, max_size=64)
PROSE = st.lists(st.sampled_from([*"ab <>\n\té{}", '"', "<tool", "_call", CLOSE]), max_size=8).map("".join)
SPACES = st.sampled_from(["", " ", "\n", "\n  "])


def parsed(
    pieces: list[str], cut: bool = False, form: ToolFormat = HERMES
) -> tuple[str, list[tuple[str, str]], ToolCallParser]:
    """(content, (name, arguments) of every call, the parser)."""
    parser = ToolCallParser(form, lambda _, key: key == "text")
    content = ""
    calls: list[tuple[str, str]] = []
    outputs: list[ParsedOutput] = [one for piece in pieces for one in parser.push(piece)]
    for one in [*outputs, *parser.flush(cut)]:
        match one:
            case TextOutput(text):
                assert text
                content += text
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert index == len(calls) - 1 and text
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls, parser


@st.composite
def cut_up(draw: st.DrawFn, text: str) -> list[str]:
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


def call_text(name: str, arguments: str, space: str = "") -> str:
    head = f'{OPEN}\n{{{space}"name"{space}: "{name}",{space} "arguments":{space}'
    return f"{head}{arguments}{space}}}\n{CLOSE}"


@given(st.data(), st.lists(st.tuples(NAMES, OBJECTS, SPACES, SPACES), min_size=1, max_size=3), st.booleans())
def test_calls_come_out_as_they_were_written(
    data: st.DataObject, asked: list[tuple[str, dict[str, object], str, str]], escape: bool
) -> None:
    written = [(name, json.dumps(value, ensure_ascii=escape)) for name, value, _, _ in asked]
    texts = [call_text(*call, space) + gap for call, (*_, space, gap) in zip(written, asked, strict=True)]
    content, calls, parser = parsed(data.draw(cut_up("Let me see.\n" + "".join(texts))))
    assert (content, calls) == ("Let me see.", written)
    assert parser.num_calls == len(written) and parser.complete


@given(st.data(), st.lists(PROSE | st.builds(call_text, NAMES, OBJECTS.map(json.dumps)), max_size=5), st.booleans())
def test_the_output_does_not_depend_on_where_the_text_is_split(
    data: st.DataObject, parts: list[str], cut: bool
) -> None:
    text = "".join(parts)
    text = text[: data.draw(st.integers(0, len(text)))]
    whole, once = parsed([text], cut), parsed(data.draw(cut_up(text)), cut)
    letters = parsed(list(text), cut)
    assert whole[:2] == once[:2] == letters[:2]
    assert whole[2].complete == once[2].complete == letters[2].complete


@given(st.data(), PROSE.filter(lambda text: OPEN not in text))
def test_text_without_a_call_is_content_to_the_letter(data: st.DataObject, text: str) -> None:
    assert parsed(data.draw(cut_up(text)))[:2] == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("a <tool_ca", "a ", []),
        ("a <", "a ", []),
        ("a\n<tool_call>", "a", []),
        ('<tool_call>\n{"name": "wea', "", []),
        ('<tool_call>\n{"name": "weather", "argum', "", []),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "R', "", [("weather", '{"city": "R')]),
        ('<tool_call>\n{"name": "weather", "arguments": {}', "", [("weather", "{}")]),
        ('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_', "", [("weather", "{}")]),
    ],
)
def test_an_answer_that_was_cut_shows_no_half_mark(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed([text], cut=True)[:2] == (content, calls)
    assert parsed(list(text), cut=True)[:2] == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> before it.",
        "x \n<tool_call>\n[1]\n</tool_call>",
        '<tool_call>{"arguments": {}, "name": "a"}</tool_call>',
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>',
        "<tool_call><tool_call>x",
        "1 <",
    ],
)
def test_text_that_only_resembles_a_call_is_content(text: str) -> None:
    assert parsed([text])[:2] == parsed(list(text))[:2] == (text, [])


def test_a_call_that_follows_a_false_mark_is_read() -> None:
    text = f"A {OPEN} is no call. {call_text('f', '{}')} Done.\n"
    assert parsed(list(text))[:2] == (f"A {OPEN} is no call. Done.", [("f", "{}")])


def test_arguments_are_returned_as_they_arrive() -> None:
    parser = ToolCallParser()
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {"a": ') == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": '),
    ]
    assert parser.push('"\\') == [ToolCallArguments(0, '"\\')]
    assert parser.push("") == []
    assert parser.push('"}') == [ToolCallArguments(0, '"}')]
    assert not parser.complete
    assert parser.push('"}') == [ToolCallArguments(0, '"}')]
    assert parser.complete


TAGGED = st.dictionaries(st.sampled_from(["text", "count", "more"]), JSON, max_size=3).map(
    lambda given: {key: str(value) if key == "text" else value for key, value in given.items()}
)


@given(st.data(), st.sampled_from(FORMATS), st.booleans())
def test_calls_are_read_in_every_format_in_which_they_are_written(
    data: st.DataObject, form: ToolFormat, talks: bool
) -> None:
    values = data.draw(st.lists(st.tuples(NAMES, TAGGED if form.tagged else OBJECTS), min_size=1, max_size=3))
    asked = [(name, json.dumps(value)) for name, value in values[: None if form.many else 1]]
    said = "Let me see.\n" if talks and not form.alone else ""
    text = said + form.written(asked)
    if form.tagged and any("</parameter>" in given for _, given in asked):
        return  # no text of a parameter can hold its own end
    content, calls, parser = parsed(data.draw(cut_up(text)), form=form)
    assert content == said.strip()
    assert [(name, json.loads(given)) for name, given in calls] == [(name, json.loads(given)) for name, given in asked]
    assert form.tagged or calls == asked
    assert parser.num_calls == len(asked) and parser.complete
    cut = text[: data.draw(st.integers(0, len(text)))]
    assert parsed([cut], cut=True, form=form)[:2] == parsed(list(cut), cut=True, form=form)[:2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", ' {\n  "name": "f",\n  "parameters": {"a": 1}\n}'),
        ("mistral_list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>1\n</parameter>\n</function>\n</tool_call>"),
        (
            "deepseek_v31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
    ],
)
def test_calls_as_models_of_each_family_write_them(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        content, calls, parser = parsed(pieces, form=BY_NAME[name])
        assert (content, [(named, json.loads(given)) for named, given in calls]) == ("", [("f", {"a": 1})])
        assert parser.complete


def test_an_answer_that_is_json_is_no_call_of_a_family_without_marks() -> None:
    for text in ('{"answer": 1}', '{"name": "Ada", "age": 3} ', 'It is {"name": "f", "parameters": {}}', " 1"):
        assert (
            parsed([text], form=BY_NAME["llama3"])[:2] == parsed(list(text), form=BY_NAME["llama3"])[:2] == (text, [])
        )
