"""Compiled constraints: the tokens that a mask allows after a path, and refusals before generation."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from paceline.core.sampling.sampler import MAX_TEXT, Constraint, ConstraintKind, Mask
from paceline.engine.fake import EOS, ByteTokenizer
from paceline.engine.families import FORMATS, ToolFormat
from paceline.engine.grammar.compiler import GrammarCompiler
from paceline.errors import RequestError

SYLLABLES = (b'{"', b'": ', b'", "', b'"}', b'"}}', b"}}", b"true", b"12", b"\xc3", b"\n<tool_call>\n", b"<tool")


class SyllableTokenizer(ByteTokenizer):
    """Bytes, longer tokens across the grammar's boundaries, two EOS ids, and a special token without bytes."""

    vocab_size = EOS + 3 + len(SYLLABLES)
    eos_ids = frozenset({EOS, EOS + 1})

    def token_bytes(self, token: int) -> bytes:
        return super().token_bytes(token) if token < EOS + 3 else SYLLABLES[token - EOS - 3]


BYTES, PIECES = GrammarCompiler(ByteTokenizer()), GrammarCompiler(SyllableTokenizer())
CLOSED: dict[str, object] = {"additionalProperties": False}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Bari", "Oslo"]}}, "required": ["city"]} | CLOSED
TOOLS = [{"name": "weather", "parameters": WEATHER}, {"name": "now"}]
SAID = {"text": {"type": "string"}, "times": {"type": "integer"}}
SAY = {"name": "say", "parameters": {"type": "object", "properties": SAID, "required": ["text"]}}


def schema(value: Mapping[str, object], grammars: GrammarCompiler = BYTES) -> Mask:
    return grammars.mask(Constraint("json_schema", json.dumps(value)))


def tools(*, required: bool, parallel: bool, named: Sequence[Mapping[str, object]] = TOOLS) -> Mask:
    return BYTES.mask(Constraint("tools", json.dumps({"tools": named, "required": required, "parallel": parallel})))


def follow(mask: Mask, text: str | bytes) -> set[int]:
    """Allowed tokens after a text of byte tokens."""
    path = list(text.encode() if isinstance(text, str) else text)
    return {token for token, allowed in enumerate(mask.allowed(path)) if allowed}


def written(mask: Mask, text: str) -> bool:
    """True if the mask allows the text byte by byte, and it is complete."""
    path = list(text.encode())
    return all(mask.allowed(path[:at])[byte] for at, byte in enumerate(path)) and mask.complete(path)


def drawn(mask: Mask, tokenizer: ByteTokenizer, chance: random.Random, limit: int = 400) -> bytes | None:
    """Text of uniformly sampled allowed tokens; None if it does not end within `limit`."""
    path: list[int] = []
    while len(path) < limit:
        token = chance.choice([token for token, allowed in enumerate(mask.allowed(path)) if allowed])
        if token in tokenizer.eos_ids:
            return b"".join(map(tokenizer.token_bytes, path))
        path.append(token)
    return None


def test_only_what_the_schema_says_can_be_written_and_then_only_the_end() -> None:
    mask = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]} | CLOSED)
    assert follow(mask, "") == {ord("{")}
    assert follow(mask, '{"a":') == {*b" -0123456789"}
    assert follow(mask, '{"a": ') == {*b"-0123456789"}, "one blank, no more"
    assert follow(mask, '{"a": 7') == {*b"0123456789}"}
    assert follow(mask, '{"a": 7}') == {EOS}
    assert mask.complete(list(b'{"a": 7}')) and not mask.complete(list(b'{"a": 7'))


def test_a_broken_path_a_special_token_and_what_comes_behind_the_end_have_no_followers() -> None:
    mask = schema({"enum": ["yes", "no"]}, PIECES)
    for path in (b'"maybe', b'"yes"!', b"\xff"):
        assert not mask.allowed(list(path)).any()
    for path in ([EOS], [*b'"no"', EOS], [*b'"no"', EOS, 65], [EOS + 2], [-1], [10**9]):
        assert not mask.allowed(path).any()
    ends = {token for token, allowed in enumerate(mask.allowed(list(b'"no"'))) if allowed}
    assert ends == {EOS, EOS + 1}, "each token that ends a text, and no other special one"


def test_a_token_may_cross_the_borders_of_the_grammar_and_no_way_to_cut_a_text_is_preferred() -> None:
    mask = schema({"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]} | CLOSED, PIECES)
    both = {ord('"'), EOS + 3 + SYLLABLES.index(b'"}')}
    assert {token for token, allowed in enumerate(mask.allowed(list(b'{"a": "x'))) if allowed} == both
    opened = [EOS + 3 + SYLLABLES.index(piece) for piece in (b'{"',)]
    assert mask.allowed([*opened, ord("a")])[EOS + 3 + SYLLABLES.index(b'": ')]


NOTES = {
    "type": "object",
    "properties": {
        "note": {"type": "string", "maxLength": 3},
        "open": {"type": "boolean"},
        "city": {"enum": ["Bari", "Oslo"]},
        "more": {"type": "object", "properties": {"note": {"type": "integer"}, "open": {"enum": ["x", 5]}}},
    },
} | CLOSED
BRANCHING = (
    Constraint("tools", json.dumps({"tools": TOOLS, "required": False, "parallel": True})),
    Constraint("json_schema", json.dumps(NOTES)),
    Constraint("json_object"),
)


@given(st.sampled_from(BRANCHING), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_what_is_allowed_follows_from_the_path_alone(constraint: Constraint, seed: int) -> None:
    """One mask evaluated on paths in any order, invalid ones included, equals a fresh mask for each path."""
    chance = random.Random(seed)
    reused = PIECES.mask(constraint)
    paths: list[list[int]] = []
    for _ in range(4):
        path: list[int] = []
        while len(path) < 40 and path[-1:] not in ([EOS], [EOS + 1]):
            path.append(chance.choice(np.flatnonzero(PIECES.mask(constraint).allowed(path)).tolist()))
        paths.append(path)
    for _ in range(30):
        path = chance.choice(paths)
        path = path[: chance.randrange(len(path) + 1)]
        if chance.random() < 0.1:
            path.append(chance.randrange(EOS + 3 + len(SYLLABLES)))
        assert (reused.allowed(path) == PIECES.mask(constraint).allowed(path)).all()


def test_a_branch_that_was_left_does_not_show_in_the_mask_of_the_next() -> None:
    """Two paths of equal length that differ in a key: llguidance 1.9 confuses them after a rollback."""
    mask = schema(NOTES)
    assert follow(mask, '{"open":') == {*b" ft"}
    assert follow(mask, '{"note":') == {*b' "'}


def test_calls_are_written_as_qwen_writes_them_and_arguments_keep_to_their_tool() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    other = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for required in (False, True):
        for parallel in (False, True):
            mask = tools(required=required, parallel=parallel)
            assert written(mask, call) and written(mask, other)
            assert written(mask, f"{call}\n{other}") is parallel
            assert written(mask, f"I look it up.\n{call}") is not required
            assert written(mask, "No need < <tool call>.") is not required
            assert not written(mask, f"{call} and so on")
            for wrong in ("Rome", "Oslo2"):
                assert not written(mask, call.replace("Oslo", wrong))
            assert not written(mask, call.replace("weather", "now"))
            assert not written(mask, f"As I said, {call[:30]} never mind")
    assert follow(tools(required=True, parallel=False), call) == {EOS}
    assert written(tools(required=True, parallel=False, named=TOOLS[:1]), call)
    assert not written(tools(required=True, parallel=False, named=TOOLS[:1]), other)


@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_calls_keep_to_their_tool_in_every_format(form: ToolFormat) -> None:
    def held(required: bool, parallel: bool = True) -> Mask:
        options = {"tools": [*TOOLS, SAY], "required": required, "parallel": parallel, "format": form.name}
        return BYTES.mask(Constraint("tools", json.dumps(options)))

    calls = [("weather", '{"city": "Oslo"}'), ("now", "{}"), ("say", '{"text": "a\\"b", "times": 2}')]
    for required in (True, False):
        for call in calls:
            assert written(held(required), form.written([call]))
        assert written(held(required), form.written(calls)) is form.many
        assert not written(held(required, parallel=False), form.written(calls))
        for wrong in (("weather", '{"city": "Rome"}'), ("other", "{}"), ("say", '{"text": "a", "times": "x"}')):
            assert not written(held(required), form.written([wrong]))
        assert written(held(required), "It is 3 < 4.") is not required
        assert written(held(required), f"I look it up.{form.written(calls[:1])}") is not (required)


def test_an_answer_of_a_form_may_be_a_call_instead() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    content = {"kind": "loose_schema", "text": json.dumps(WEATHER)}
    options = {"tools": TOOLS, "required": False, "parallel": True, "content": content}
    mask = BYTES.mask(Constraint("tools", json.dumps(options)))
    assert written(mask, '{"city": "Oslo"}') and written(mask, f"{call}\n{call}")
    for wrong in ("I look it up.", '{"city": "Rome"}', f'{{"city": "Oslo"}}\n{call}', f"I look it up.\n{call}"):
        assert not written(mask, wrong)
    assert not written(BYTES.mask(Constraint("tools", json.dumps(options | {"required": True}))), '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("blamed", "tool", "content"), [("tools", "frob", "object"), ("response_format", "object", "frob")]
)
def test_the_schema_to_blame_is_named(blamed: str, tool: str, content: str) -> None:
    named = [{"name": "f", "parameters": {"properties": {"a": {"type": tool}}}}]
    held = {"kind": "loose_schema", "text": json.dumps({"type": content})}
    options = {"tools": named, "required": False, "parallel": True, "content": held}
    with pytest.raises(RequestError, match="frob") as refused:
        BYTES.mask(Constraint("tools", json.dumps(options)))
    assert refused.value.param == blamed


def test_references_of_a_tool_count_from_its_own_schema_and_names_are_quoted() -> None:
    tree = {"$defs": {"n": {"type": "integer"}}, "properties": {'a"b': {"$ref": "#/$defs/n"}}, "required": ['a"b']}
    mask = tools(required=True, parallel=False, named=[*TOOLS, {"name": 'q"%json\n', "parameters": tree | CLOSED}])
    name = json.dumps('q"%json\n')
    assert written(mask, f'<tool_call>\n{{"name": {name}, "arguments": {{"a\\"b": 5}}}}\n</tool_call>')


def test_any_object_and_nothing_else() -> None:
    mask = BYTES.mask(Constraint("json_object"))
    for value in ({}, {"a": [1, 2.5e3, None, {"b": "\n é 日"}], "": True}):
        assert written(mask, json.dumps(value, ensure_ascii=False))
        assert written(mask, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    assert follow(mask, "") == {ord("{")}
    assert not {*b" \n\t"} & follow(mask, '{"a": ')


REFUSED: dict[str, object] = {
    "not JSON": "{",
    "an unknown type": {"type": "frob"},
    "a bad reference": {"$ref": "https://example.org/schema"},
    "a bad pattern": {"type": "string", "pattern": "(("},
    "an unknown format": {"type": "string", "format": "frob"},
    "nothing fits": {"type": "integer", "minimum": 5, "maximum": 1},
    "too many remainders": {"anyOf": [{"type": "integer", "multipleOf": 9973}, {"type": "number", "multipleOf": 0.97}]},
    "too many below a name of data": {"properties": {"enum": {"default": {}, "multipleOf": 1_000_003}}},
    "a truth for a number": {"type": "integer", "multipleOf": True},
    "a reference to itself": {"$ref": "#"},
    "every long integer": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "overlapping alternatives": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "very deep": '{"items":' * 20_000 + "{}" + "}" * 20_000,
    "half a character": '{"const": "\\ud800"}',
    "large": {"enum": ["x" * MAX_TEXT]},
    "too many to leave out": {"items": {"properties": {f"field {i}": {"type": "string"} for i in range(401)}}},
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_a_schema_that_cannot_be_kept_is_refused_with_a_sentence(value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    for constraint in (
        Constraint("json_schema", text),
        Constraint(
            "tools",
            f'{{"tools": [{{"name": "f", "parameters": {text}, "strict": true}}], "required": true, "parallel": true}}',
        ),
    ):
        with pytest.raises(RequestError) as refused:
            BYTES.mask(constraint)
        assert refused.value.status == 400
        assert refused.value.param == ("tools" if constraint.kind == "tools" else "response_format")
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 700
        assert str(refused.value).endswith(".") or "JSON" in str(refused.value)
        assert "NoExtension" not in str(refused.value) and "^" not in str(refused.value)


def test_an_object_with_many_properties_that_may_be_left_out_is_kept_or_refused_before_the_answer() -> None:
    """With 500 llguidance gave up at the first brace, after a mask of up to 0.2 s on the loop that serves everybody."""
    names = [f"field {i}" for i in range(400)]
    many = {"type": "object", "properties": {key: {"type": "string"} for key in names}}
    text = json.dumps({name: "x" for name in names[::7]})
    kinds: tuple[ConstraintKind, ...] = ("json_schema", "loose_schema")
    for kind in kinds:
        assert written(BYTES.mask(Constraint(kind, json.dumps(many))), text)
        too_many = many | {"properties": {key: {"type": "string"} for key in [*names, "one more"]}}
        with pytest.raises(RequestError, match="401 properties that may be left out; 400 may be"):
            BYTES.mask(Constraint(kind, json.dumps(too_many)))
        assert BYTES.mask(Constraint(kind, json.dumps(too_many | {"required": ["one more"]})))


def test_what_another_owner_has_had_compiled_is_compiled_anew() -> None:
    compiler, schema = GrammarCompiler(ByteTokenizer()), Constraint("json_schema", '{"type": "object"}')
    compiler.mask(schema, "ann")
    assert compiler.known(schema, "ann") is not None
    assert compiler.known(schema, "bert") is None


DATA: dict[str, object] = {
    "a default": {"default": {"multipleOf": 1_000_003}},
    "one of several": {"enum": [{"multipleOf": 1_000_003}, {"multipleOf": True}, {"multipleOf": 10**300}]},
    "a name": {"properties": {"multipleOf": {"type": "integer", "multipleOf": 5}}},
}


@pytest.mark.parametrize("value", DATA.values(), ids=DATA.keys())
def test_what_is_only_data_is_no_keyword(value: Mapping[str, object]) -> None:
    assert schema(value).allowed([]).any()


# schema, a value that fits, a value that the relaxed schema still refuses
LOOSE: dict[str, tuple[dict[str, object], object, object]] = {
    "unique items": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1], ["a"]),
    "not": ({"type": "string", "not": {"const": "a"}, "maxLength": 1}, "b", "bb"),
    "if": ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}} | CLOSED, {}, {"a": 1}),
    "alternatives": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "abcde", 5),
    "a reference": ({"type": "string", "format": "uri-reference", "maxLength": 3}, "a/b", "a/bc"),
    "look-ahead": ({"type": "string", "pattern": "^(?=.*[0-9])", "maxLength": 3}, "a1", "a1bc"),
    "look-behind in a name": (
        {"patternProperties": {"(?<!a)b": {"type": "integer"}}, "required": ["b"]} | CLOSED,
        {"b": 1},
        {"c": 1},
    ),
    "a bad pattern": ({"type": "string", "pattern": "((", "maxLength": 1}, "a", "aa"),
    "remainders": ({"type": "integer", "multipleOf": 1_000_003}, 1_000_003, "a"),
}


@pytest.mark.parametrize(("value", "fits", "breaks"), LOOSE.values(), ids=LOOSE.keys())
def test_what_cannot_be_kept_is_left_out_of_a_schema_that_is_not_strict(
    value: dict[str, object], fits: object, breaks: object
) -> None:
    loose = BYTES.mask(Constraint("loose_schema", json.dumps(value)))
    assert written(loose, json.dumps(fits)) and not written(loose, json.dumps(breaks))
    inside = {"type": "object", "properties": {"a": value}, "required": ["a"]} | CLOSED
    strict = {"name": "weather", "parameters": WEATHER, "strict": True}
    for named in (
        [strict, {"name": "f", "parameters": inside}],
        [{"name": "f", "parameters": inside, "strict": False}],
    ):
        mask = tools(required=True, parallel=False, named=named)
        call = '<tool_call>\n{"name": "f", "arguments": {"a": %s}}\n</tool_call>'
        assert written(mask, call % json.dumps(fits)) and not written(mask, call % json.dumps(breaks))


def test_a_model_without_an_end_can_hold_no_answer_to_a_form() -> None:
    class Endless(ByteTokenizer):
        eos_ids = frozenset[int]()

    with pytest.raises(RequestError, match="no end-of-text token"):
        GrammarCompiler(Endless()).mask(Constraint("json_object"))


def test_a_text_too_intricate_for_the_compiler_ends_and_the_mask_goes_on_serving_others() -> None:
    mask = schema({"type": "string", "pattern": "^((([a-z]{1,50}){1,50}){1,50}){1,50}$"})
    assert not any(mask.allowed(list(b'"abab' + b"ab" * n)).all() for n in range(3))
    assert follow(mask, "") == {ord('"')}


# ---- any model ------------------------------------------------------------------------------------------------------
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
INTS, SIZES = st.integers(-200, 200), st.integers(0, 4)
PATTERNS = ("^[a-c]{1,3}$", "^(ab|c)d?$", "^[0-9]{2}-[0-9]{2}$")
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}]),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, INTS, st.integers(0, 90)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, SIZES, SIZES),
    st.lists(st.one_of(NAMES, INTS, st.booleans(), st.none()), min_size=1, max_size=4).map(lambda some: {"enum": some}),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["date", "time", "uuid"]).map(lambda name: {"type": "string", "format": name}),
)


def nested(inner: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    arrays = st.builds(
        lambda each, low, more: {"type": "array", "items": each, "minItems": low, "maxItems": low + more},
        inner,
        SIZES,
        SIZES,
    )
    objects = st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda held: st.sets(st.sampled_from(sorted(held)) if held else st.nothing()).map(
            lambda required: {"type": "object", "properties": held, "required": sorted(required)} | CLOSED
        )
    )
    return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}))


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=5)


@given(SCHEMAS, st.integers(0, 2**32))
@settings(deadline=None, max_examples=100)
def test_every_text_that_can_be_written_validates(value: dict[str, object], seed: int) -> None:
    text = drawn(schema(value, PIECES), SyllableTokenizer(), random.Random(seed))
    if text is not None:
        validator = Draft202012Validator(value, format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(text))


@given(SCHEMAS, st.booleans(), st.booleans(), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_every_call_that_can_be_written_names_a_tool_and_fits_it(
    value: dict[str, object], required: bool, parallel: bool, seed: int
) -> None:
    parameters = {"type": "object", "properties": {"value": value}, "required": ["value"]} | CLOSED
    known = {"f": parameters, "weather": WEATHER}
    named = [{"name": name, "parameters": parameters} for name, parameters in known.items()]
    options = json.dumps({"tools": named, "required": required, "parallel": parallel})
    mask = PIECES.mask(Constraint("tools", options))
    text = drawn(mask, SyllableTokenizer(), random.Random(seed))
    if text is None:
        return
    before, *calls = text.decode().split("<tool_call>\n")
    assert not (required and before) and (parallel or len(calls) <= 1) and (calls or not required)
    for call in calls:
        called = json.loads(call.strip().removesuffix("</tool_call>"))
        assert set(called) == {"name", "arguments"}
        Draft202012Validator(known[called["name"]]).validate(called["arguments"])


# ---- forms that are no JSON -----------------------------------------------------------------------------------------
def test_a_pattern_holds_for_the_whole_answer_with_or_without_anchors() -> None:
    for pattern in (r"\d{3}/[ab]+", r"^\d{3}/[ab]+$"):
        mask = BYTES.mask(Constraint("regex", pattern))
        assert written(mask, "123/ab")
        assert not written(mask, "123/") and not written(mask, "x123/ab") and not written(mask, "123/abc")


def test_one_of_the_choices_is_written_whatever_characters_they_have() -> None:
    choices = ["yes", "yes/no", 'a "quote"\n', "grün \\d", "%json"]
    mask = BYTES.mask(Constraint("choice", json.dumps(choices)))
    assert all(written(mask, choice) for choice in choices)
    assert not written(mask, "no") and not written(mask, "yes/")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= item ("," item)*\nitem ::= "a" [0-9]{2} # two digits',
        'start: ITEM ("," ITEM)*\nITEM: /a[0-9]{2}/',
        '%llguidance {}\nstart: ITEM ("," ITEM)*\nITEM: /a[0-9]{2}/',
    ],
)
def test_a_grammar_may_be_in_gbnf_or_lark(text: str) -> None:
    mask = BYTES.mask(Constraint("grammar", text))
    assert written(mask, "a12") and written(mask, "a12,a99")
    assert not written(mask, "a1") and not written(mask, "a12;")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(", "pattern"),
        ("grammar", "root ::= (", "as GBNF"),
        ("grammar", "start: missing", "missing"),
        ("grammar", "start: %json {}", "%json"),
        ("grammar", "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(5000)), "500 rules"),
        ("grammar", "root ::= r0\n" + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(600)), "500 rules"),
        ("grammar", "root ::= " + "(" * 5000, "as GBNF"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_under_the_name_of_its_field(
    kind: ConstraintKind, text: str, words: str
) -> None:
    for param in ("guided_x", "grammar"):  # the refusal is remembered, the name is the request's
        with pytest.raises(RequestError, match=re.escape(words)) as refused:
            BYTES.mask(Constraint(kind, text, param=param))
        assert (refused.value.param, refused.value.code) == (param, f"invalid_{kind}")


# ---- values that would not end --------------------------------------------------------------------------------------
FREE = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


@pytest.mark.parametrize("period", ["!", "!.", "word ", "\\n", 'ab\\"cd', "12345678"])
def test_a_string_in_which_a_period_stands_32_times_can_only_be_closed(period: str) -> None:
    for mask in (schema(FREE), BYTES.mask(Constraint("json_object"))):
        assert follow(mask, f'{{"a": "{period * 31}') - {ord('"')}
        assert follow(mask, f'{{"a": "x{period * 32}') == {ord('"')}
        assert follow(mask, f'{{"a": "{period * 40}') == {ord('"')}
        assert follow(mask, f'{{"a": "{period * 32}", "b": 1') >= {ord("}")}


def test_a_number_that_would_not_end_is_ended() -> None:
    mask = schema(FREE)
    assert {*b"0123456789"} <= follow(mask, '{"a": "", "b": 1' + "0" * 31)
    assert follow(mask, '{"a": "", "b": 1' + "0" * 32) == {ord("}")}
    assert follow(mask, '{"a": "' + "0" * 32) == {ord('"')}, "digits of a string are no number"


def test_text_before_a_call_may_repeat_itself_and_arguments_may_not() -> None:
    mask = tools(required=False, parallel=True, named=[{"name": "f", "parameters": FREE}])
    for text in ("!" * 300, 'He said "' + "!" * 300, "0" * 300):
        assert {*b'0a"!', EOS} <= follow(mask, text)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "'
    assert follow(mask, f'I say "\n{call}' + "!" * 32) == {ord('"')}
    assert follow(tools(required=True, parallel=True, named=[{"name": "f", "parameters": FREE}]), call + "!" * 32) == {
        ord('"')
    }


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_the_models_own_end_may_be_ruled_out_for_ever() -> None:
    mask = PIECES.mask(Constraint("text", min_tokens=2, ignore_eos=True, stop_ids=(7,)))
    early, late = mask.allowed([1]), mask.allowed([1] * 500)
    assert early is not None and not early[[7, EOS, EOS + 1]].any()
    assert late is not None and late[7] and not late[[EOS, EOS + 1]].any()


def test_a_form_that_lets_nothing_follow_wins() -> None:
    mask = BYTES.mask(Constraint("regex", "ab*", min_tokens=3))
    assert follow(mask, "a") == follow(mask, "ab") == {ord("b")}
    assert follow(mask, "abb") == {ord("b"), EOS}
    assert follow(BYTES.mask(Constraint("choice", '["yes"]', ignore_eos=True)), "yes") == {EOS}
