"""Closed objects: no other names than those of the schema; every value of a closed schema fits the original."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from paceline.core.sampling.sampler import Constraint
from paceline.engine.fake import ByteTokenizer
from paceline.engine.grammar.compiler import GrammarCompiler
from paceline.engine.grammar.json_schema import closed
from paceline.errors import RequestError
from tests.engine.grammar.test_compiler import drawn, written

GRAMMARS = GrammarCompiler(ByteTokenizer())
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}


class Point(BaseModel):
    x: int
    y: int | None = None


class Shape(BaseModel):
    name: str = Field(max_length=4)
    points: list[Point] = Field(max_length=2)
    parent: Shape | None = None
    origin: Point | Shape | None = None


def fits(schema: dict[str, Any], *, strict: bool = False) -> Any:
    """Predicate: a value's JSON is allowed byte by byte under the schema's mask, and complete."""
    mask = GRAMMARS.mask(Constraint("json_schema" if strict else "loose_schema", json.dumps(schema)))
    return lambda value: written(mask, json.dumps(value))


@pytest.mark.parametrize("strict", [True, False])
def test_an_object_that_names_properties_has_no_others(strict: bool) -> None:
    can_write = fits(A, strict=strict)
    assert can_write({"a": 1}) and can_write({})
    assert not can_write({"z": 1}) and not can_write({"a": 1, "z": 1})


def test_what_the_schema_allows_by_its_words_stays_allowed() -> None:
    assert fits({**A, "additionalProperties": True})({"a": 1, "z": []})
    assert fits({**A, "additionalProperties": {"type": "string"}})({"a": 1, "z": "x"})
    assert fits({"type": "object"})({"z": 1})
    assert fits({})({"z": 1})
    assert fits({**A, "patternProperties": {"^x": {"type": "integer"}}})({"a": 1, "xy": 2})
    assert not fits({**A, "patternProperties": {"^x": {"type": "integer"}}})({"a": 1, "y": 2})
    assert not fits({"type": "object", "properties": {}})({"z": 1}), "a function without parameters"


def test_what_must_be_there_may_be_there_though_it_has_no_schema() -> None:
    can_write = fits({**A, "required": ["a", "b"]})
    assert can_write({"a": 1, "b": "anything"}) and not can_write({"a": 1, "b": 2, "c": 3})
    asked = {**A, "dependentRequired": {"a": ["d"]}}
    assert closed(asked)["properties"] == {**A["properties"], "d": True}
    assert closed({**A, "minProperties": 2}) == {**A, "minProperties": 2}, "two properties need another name"


def test_what_is_put_together_is_closed_as_a_whole() -> None:
    for together in (
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {"$defs": {"A": A}, "$ref": "#/$defs/A", **B},
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {**A, "if": {"required": ["a"]}, "then": B},
    ):
        can_write = fits(together)
        assert can_write({"a": 1, "b": 2}), together
        assert not can_write({"a": 1, "b": 2, "c": 3}), together
        assert not can_write({"a": "x", "b": 2}), together


def test_a_part_that_is_open_by_its_words_leaves_the_whole_open() -> None:
    can_write = fits({"allOf": [A, {"type": "object", "additionalProperties": True}]})
    assert can_write({"a": 1, "z": 2})
    can_write = fits(
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, {"additionalProperties": {"type": "integer"}}]}
    )
    assert can_write({"z": 2})


def test_a_definition_that_is_a_part_somewhere_stays_open_where_it_stands_alone() -> None:
    schema = {
        "$defs": {"A": A},
        "properties": {"alone": {"$ref": "#/$defs/A"}, "part": {"allOf": [{"$ref": "#/$defs/A"}, B]}},
    }
    can_write = fits(schema)
    assert can_write({"alone": {"a": 1, "z": 2}, "part": {"a": 1, "b": 2}})
    assert not can_write({"part": {"a": 1, "c": 2}}) and not can_write({"z": 1})


@pytest.mark.parametrize("union", ["anyOf", "oneOf"])
def test_alternatives_are_closed_each_for_itself(union: str) -> None:
    can_write = fits({"type": "object", union: [{**A, "required": ["a"]}, {**B, "required": ["b"]}]})
    assert can_write({"a": 1}) and can_write({"b": 1})
    assert not can_write({"a": 1, "b": 1}) and not can_write({"a": 1, "z": 1})


def test_to_the_letter_alternatives_that_overlap_are_refused_as_before() -> None:
    """{"a": 1} fits both; if they were closed it would fit only one, contrary to a validator of the schema."""
    with pytest.raises(RequestError, match="oneOf"):
        fits({"oneOf": [A, B]}, strict=True)


def test_a_schema_that_cannot_be_kept_closed_is_kept_as_it_is() -> None:
    schema = {**A, "const": {"a": 1, "z": 2}}
    assert fits(schema)({"a": 1, "z": 2})
    within = {**A, "properties": {"inner": {"$id": "http://example.org/x", **B}}}
    assert closed(within) == within, "its references would be relative to that id"
    nowhere = {"allOf": [{"$ref": "#/$defs/missing"}, B]}
    assert closed(nowhere)["allOf"] == nowhere["allOf"]
    assert closed({"allOf": [{"$ref": "http://example.org/a"}, B]})["allOf"][1] == B  # type: ignore[index]  # a list


@pytest.mark.parametrize("strict", [True, False])
def test_an_object_that_is_closed_by_its_words_gets_no_name_of_its_parts(strict: bool) -> None:
    shut = {**A, "additionalProperties": False}
    for whole in (
        {**shut, "anyOf": [B, {"required": ["a"]}]},
        {**shut, "allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}},
        {**shut, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ):
        can_write = fits(whole, strict=strict)
        assert can_write({"a": 1}) and not can_write({"b": 1}) and not can_write({"a": 1, "b": 1}), whole
    with pytest.raises(RequestError):
        fits({**shut, "required": ["a", "b"]}, strict=strict)


def test_references_in_a_circle_end() -> None:
    circle = {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}, A]}, "B": {"allOf": [{"$ref": "#/$defs/A"}, B]}}}
    assert closed({**circle, "$ref": "#/$defs/A"})
    assert closed({"allOf": [{"$ref": "#"}, A]})


def test_a_schema_made_to_multiply_does_not() -> None:
    definitions = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}, A]} for i in range(60)
    }
    schema = {"$defs": {**definitions, "d60": A}, "allOf": [{"$ref": "#/$defs/d0"}, B]}
    assert closed(schema)["properties"] == {"a": True, "b": True}


@pytest.mark.parametrize("model", [Point, Shape])
def test_what_pydantic_writes_ends_whatever_a_model_draws(model: type[BaseModel]) -> None:
    """Uniformly sampled text ends a closed object soon; an open one hardly ever ends within the limit."""
    mask = GRAMMARS.mask(Constraint("loose_schema", json.dumps(model.model_json_schema())))
    chance = random.Random(5)
    texts = [text for _ in range(30) if (text := drawn(mask, ByteTokenizer(), chance, 2000)) is not None]
    assert len(texts) >= 20
    for text in texts:
        model.model_validate_json(text)


names = st.sampled_from(["a", "b", "c"])
plain = st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "string"}, {}])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    rest = {
        "required": st.lists(names, max_size=2, unique=True),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
        "minProperties": st.integers(0, 2),
        "then": inner,
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=1),
    }
    return st.fixed_dictionaries({}, optional={"properties": st.dictionaries(names, inner, max_size=2), **rest})


schemas = st.recursive(plain, lambda inner: objects(inner) | st.builds(lambda one: {"items": one}, inner), max_leaves=6)
scalars = st.integers(0, 1) | st.booleans() | st.just("s")
values = st.recursive(scalars, lambda inner: st.dictionaries(st.sampled_from("abcz"), inner, max_size=3), max_leaves=6)


@given(
    st.fixed_dictionaries({"$defs": st.fixed_dictionaries({"x": plain | objects(plain), "y": objects(plain)})}),
    schemas,
    values,
)
def test_what_fits_a_closed_schema_fits_the_schema(definitions: dict[str, Any], schema: Any, value: Any) -> None:
    full_schema = {**schema, **definitions}
    try:
        fits_given = Draft202012Validator(full_schema).is_valid(value)
    except RecursionError:  # circular references, which the validator follows without end
        return
    assert fits_given or not Draft202012Validator(closed(full_schema)).is_valid(value)
