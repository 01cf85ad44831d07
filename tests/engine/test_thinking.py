"""Thinking before an answer: the same division however the text is cut, and masks that agree with it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling.sampler import Constraint, Mask, Thinking
from paceline.engine.fake import EOS, ByteTokenizer
from paceline.engine.families import CHANNELS, Part, format_of, marks_of, text_parts, thinking_after
from paceline.engine.grammar.compiler import GrammarCompiler

MARKS = ("<think>", "</think>")
MAY, BEGUN = Thinking(*MARKS), Thinking(*MARKS, begun=True)
IN_CHANNELS = Thinking(*CHANNELS)
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
THINKS, NEXT = CHANNELS
YES = '{"enum": ["yes", "no"]}'


class MarkTokenizer(ByteTokenizer):
    """Bytes, both marks as tokens of their own, and tokens across the end of the second."""

    PIECES: tuple[bytes, ...] = (b"<think>", b"</think>", b"\n\n", b"k>", b'k>"', b"k>\n\n")
    vocab_size = EOS + 1 + len(PIECES)
    thinking = MARKS

    def token_bytes(self, token: int) -> bytes:
        return super().token_bytes(token) if token <= EOS else self.PIECES[token - EOS - 1]

    def encode(self, text: str, *, own: bool = False) -> list[int]:
        if own or text == "\n\n":
            return [EOS + 1 + self.PIECES.index(text.encode())]
        return super().encode(text)


class ChannelTokenizer(MarkTokenizer):
    """Bytes, and the tokens of channels."""

    PIECES = (b"<|channel|>", b"<|message|>", b"<|end|>", b"<|start|>", b"<|constrain|>")
    vocab_size = EOS + 1 + len(PIECES)
    thinking = CHANNELS

    def encode(self, text: str, *, own: bool = False) -> list[int]:
        parts = re.split("(<[|][a-z]+[|]>)", text) if own else [text]
        return [token for part in parts for token in self._encoded(part.encode())]

    def _encoded(self, part: bytes) -> list[int]:
        return [EOS + 1 + self.PIECES.index(part)] if part in self.PIECES else list(part)


GRAMMARS = GrammarCompiler(MarkTokenizer())
OPEN, CLOSE, LINES, LAST, QUOTE, LAST_LINES = range(EOS + 1, EOS + 7)


def divided(pieces: Sequence[str], thinking: Thinking | None) -> tuple[str, str, Part]:
    """(thinking, answer, the part in which the text ends)"""
    reader = text_parts(thinking)
    found = [piece for text in pieces for piece in reader.push(text)] + reader.flush()
    assert all(piece.text for piece in found)
    return (
        "".join(piece.text for piece in found if piece.thought),
        "".join(piece.text for piece in found if not piece.thought),
        reader.part,
    )


THINKING = [
    ("<think>\nTwo and two.\n</think>\n\nFour.", MAY, "Two and two.", "Four."),
    ("\nTwo and two.\n</think>\n\nFour.", BEGUN, "Two and two.", "Four."),
    (" \n<think></think>Four.", MAY, "", "Four."),
    ("<think>a < b </thin b</think>c</think>d", MAY, "a < b </thin b", "c</think>d"),
    ("<think>never ends </thi", MAY, "never ends </thi", ""),
    (" Four. <think>Two</think>", MAY, "", " Four. <think>Two</think>"),
    ("<thinking is hard>", MAY, "", "<thinking is hard>"),
    ("<thi", MAY, "", "<thi"),
    ("<think>Two</think> Four.", None, "", "<think>Two</think> Four."),
    (f"Two{NEXT}<|channel|>final<|message|>Four.", Thinking(*CHANNELS, begun=True), "Two", "Four."),
]
CHANNELED = [
    (f"<|channel|>analysis<|message|>Two\n{NEXT}<|channel|>final<|message|>Four.", "Two\n", "Four."),
    ("<|channel|>final<|message|>Four.", "", "Four."),
    ("Four.", "", "Four."),
    ("<", "", "<"),
    (f"\n{THINKS}Two{NEXT}<|channel|>final<|message|>Four.", "Two", "Four."),
    ("<|channel|>analysis<|message|>never ends <|en", "never ends <|en", ""),
    (f"<|channel|>analysis<|message|>Two{NEXT}<|channel|>fin", "Two", ""),
    (f"<|channel|>analysis<|message|>Ask.{NEXT}{CALL}", "Ask.", CALL),
    (f"<|channel|>commentary<|message|>I ask.{NEXT}{CALL}", "", "I ask." + CALL),
    (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", CALL),
    (
        f'<|channel|>analysis<|message|>A{NEXT}<|channel|>analysis to=functions.add code<|message|>{{"a": 1}}',
        "A",
        CALL,
    ),
    (
        f"<|channel|>analysis<|message|>A{NEXT}<|channel|>analysis<|message|>B{NEXT}<|channel|>final<|message|>C",
        "A\nB",
        "C",
    ),
    ("<|channel|>" + "a" * 300 + "<|message|>b", "", "<|channel|>" + "a" * 300 + "<|message|>b"),
    ("<|channel|>" + "a" * 600, "", "<|channel|>" + "a" * 600),
]


@pytest.mark.parametrize(
    ("text", "thinking", "thought", "answer"),
    [*THINKING, *((text, IN_CHANNELS, thought, answer) for text, thought, answer in CHANNELED)],
)
def test_thinking_and_calls_stand_before_the_answer(
    text: str, thinking: Thinking | None, thought: str, answer: str
) -> None:
    assert divided([text], thinking)[:2] == divided(list(text), thinking)[:2] == (thought, answer)


MESSAGES = [
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "analysis",
    "final",
    " to=functions.",
    "a <",
    " ",
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=14).map("".join))
def test_where_channels_are_cut_makes_no_difference(text: str) -> None:
    assert divided(list(text), IN_CHANNELS) == divided([text], IN_CHANNELS)


TEXTS = st.lists(st.sampled_from([*MARKS, "<", "</th", "think>", " ", "\n", "ab", "é"]), max_size=9).map("".join)


@given(TEXTS, st.sampled_from([MAY, BEGUN]))
def test_where_a_text_is_cut_makes_no_difference_and_masks_see_the_same_parts(text: str, thinking: Thinking) -> None:
    whole = divided([text], thinking)
    assert divided(list(text), thinking) == whole
    mask = GRAMMARS.mask(Constraint("regex", "(?s:.)*", thinking=thinking))
    assert mask.complete(list(text.encode())) == (whole[2] != "thinking")


def follow(mask: Mask, path: Sequence[int]) -> set[int]:
    allowed = mask.allowed(path)
    assert allowed is not None
    return {token for token, is_allowed in enumerate(allowed) if is_allowed}


def test_a_form_begins_behind_the_second_mark() -> None:
    mask = GRAMMARS.mask(Constraint("json_schema", YES, thinking=MAY))
    anything = set(range(GRAMMARS._tokenizer.vocab_size)) - {EOS}
    assert follow(mask, []) == {ord('"'), OPEN}
    assert follow(mask, [OPEN]) == follow(mask, [OPEN, *b"hm </thin"]) == anything
    assert follow(mask, [OPEN, *b"hm", CLOSE]) == {ord('"'), ord("\n"), LINES}
    assert follow(mask, [OPEN, *b"hm", CLOSE, LINES]) == {ord('"')}
    for answered in ([CLOSE, LINES, *b'"'], [*b"</think>\n", *b'"'], [*b"</thin", LAST, ord('"')], [*b"</thin", QUOTE]):
        assert follow(mask, [OPEN, *b"hm", *answered]) == {ord("y"), ord("n")}
        assert not mask.complete([OPEN, *b"hm", *answered])
        assert mask.complete([OPEN, *b"hm", *answered, *b'no"'])
    assert follow(mask, [OPEN, *b"hm</thin", LAST_LINES, *b'"no"']) == {EOS}
    assert follow(mask, [*b'"']) == {ord("y"), ord("n")}  # it has not thought


def test_a_mask_follows_from_the_path_alone() -> None:
    paths = [[OPEN, *b"hm", CLOSE, *b'"'], [*b'"y'], [OPEN, *b"h"], [OPEN, *b"hm</thin", QUOTE, *b"n"], []]
    fresh = [follow(GRAMMARS.mask(Constraint("json_schema", YES, thinking=MAY)), path) for path in paths]
    used = GRAMMARS.mask(Constraint("json_schema", YES, thinking=MAY))
    for order in (paths, paths[::-1], paths):
        assert {tuple(path): follow(used, path) for path in order} == dict(zip(map(tuple, paths), fresh, strict=True))


@pytest.mark.parametrize("kind", ["text", "json_schema"])
def test_a_budget_of_thinking_ends_with_the_second_mark(kind: str) -> None:
    text = YES if kind == "json_schema" else ""
    mask = GRAMMARS.mask(Constraint(kind, text, thinking=Thinking(*MARKS, budget=3)))  # type: ignore[arg-type]
    assert mask.allowed([OPEN, *b"ab"]) is None or follow(mask, [OPEN, *b"ab"]) > {CLOSE}
    assert follow(mask, [OPEN, *b"abc"]) == {CLOSE}
    none = GRAMMARS.mask(Constraint(kind, text, thinking=Thinking(*MARKS, budget=0)))  # type: ignore[arg-type]
    assert OPEN not in follow(none, [])
    begun = GRAMMARS.mask(Constraint(kind, text, thinking=Thinking(*MARKS, begun=True, budget=0)))  # type: ignore[arg-type]
    assert follow(begun, []) == {CLOSE}


def test_a_form_in_channels_stands_in_the_last() -> None:
    tokenizer = ChannelTokenizer()
    grammars = GrammarCompiler(tokenizer)
    channel, message, end, start, _ = range(EOS + 1, EOS + 6)
    thought, final = [channel, *b"analysis", message, *b"hm"], [channel, *b"final", message]
    after = [*thought, *tokenizer.encode(NEXT, own=True)]
    mask = grammars.mask(Constraint("json_schema", YES, thinking=IN_CHANNELS))
    assert follow(mask, []) == {channel}
    assert follow(mask, [channel]) == {ord("a"), ord("f")}
    assert follow(mask, thought) == set(range(tokenizer.vocab_size)) - {EOS}
    assert follow(mask, [*thought, end]) == {start}
    for before in (after, []):
        assert ord("i") in follow(mask, [*before, channel, ord("f")])
        assert follow(mask, [*before, *final]) == {ord('"')}
        assert not mask.complete([*before, *final]) and not mask.complete([*before, channel])
        assert mask.complete([*before, *final, *b'"no"']) and follow(mask, [*before, *final, *b'"no"']) == {EOS}
    silent = grammars.mask(Constraint("json_schema", YES, thinking=Thinking(*CHANNELS, budget=0)))
    assert follow(silent, [channel]) == {ord("f")}
    short = grammars.mask(Constraint("text", "", thinking=Thinking(*CHANNELS, budget=2)))
    assert follow(short, thought) == {end} and follow(short, after) == {channel}
    tools = '{"tools": [{"name": "add", "parameters": {"type": "object"}}], "format": "harmony", "parallel": false'
    call = tokenizer.encode(CALL, own=True)
    held = f'"required": false, "content": {{"kind": "json_schema", "text": {json.dumps(YES)}}}'
    for rest, says, is_form in (
        ('"required": true', False, False),
        ('"required": false', True, False),
        (held, True, True),
    ):
        mask = grammars.mask(Constraint("tools", f"{tools}, {rest}}}", thinking=IN_CHANNELS))
        assert mask.complete([*after, *call]) and follow(mask, [*after, *call[:-1]]) >= {call[-1]}
        assert follow(mask, after) == {channel}
        assert follow(mask, [*after, channel]) == {ord("c"), *([ord("f")] if says else [])}
        assert mask.complete([*after, *final, *b'"no"']) == says
        assert mask.complete([*after, *final, *b"well"]) == (says and not is_form)
        assert not says or end not in follow(mask, [*after, *final, *b'"n'])


def test_a_template_says_whether_a_model_thinks_and_how() -> None:
    assert marks_of("{{ content.split('</think>')[-1] }}") == MARKS
    assert marks_of("[THINK]{{ thinking }}[/THINK]") == ("[THINK]", "[/THINK]")
    assert marks_of("<|im_start|>{{ message.content }}<|im_end|>") is None
    shown = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    assert (marks_of(shown), format_of(shown).name) == (CHANNELS, "harmony")
    prompt = "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
    assert thinking_after(prompt, CHANNELS, "", None) == IN_CHANNELS
    assert thinking_after(f"{prompt}<|channel|>final<|message|>It is", CHANNELS, "It is", None) is None


@pytest.mark.parametrize(
    ("prompt", "begun", "found"),
    [
        ("<|im_start|>assistant\n", "", MAY),
        ("<|im_start|>assistant\n<think>\n", "", BEGUN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", None),
        ("<|im_start|>user\n<think>\n<|im_start|>assistant\n", "", MAY),
        ("<|im_start|>assistant\nIt is", "It is", None),
        ("<|im_start|>assistant\n<think>\nIt is", "It is", BEGUN),
        ("<|im_start|>assistant\n<think>It is", "<think>It is", BEGUN),
        ("<|im_start|>assistant\n<think>2</think>It is", "<think>2</think>It is", None),
    ],
)
def test_a_prompt_says_whether_thinking_has_begun(prompt: str, begun: str, found: Thinking | None) -> None:
    assert thinking_after(prompt, MARKS, begun, None) == found
