"""Filters: algebraic properties of comparisons and their combinations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.rag.store.vector_stores import Comparison, Compound, Filter, Value, matches

KEYS = st.sampled_from("abc")
VALUES: st.SearchStrategy[Value] = st.one_of(
    st.booleans(), st.integers(-2, 2), st.sampled_from([-0.5, 0.0, 1.0, 1.5]), st.sampled_from(["", "x", "xy", "1"])
)
ATTRIBUTES = st.dictionaries(KEYS, VALUES)
SCALARS = st.builds(Comparison, st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte"]), KEYS, VALUES)
LISTS = st.builds(Comparison, st.sampled_from(["in", "nin"]), KEYS, st.lists(VALUES, max_size=3).map(tuple))
FILTERS: st.SearchStrategy[Filter] = st.recursive(
    SCALARS | LISTS,
    lambda parts: st.builds(
        Compound, st.sampled_from(["and", "or"]), st.lists(parts, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@given(FILTERS, FILTERS, ATTRIBUTES)
def test_and_holds_if_both_hold_and_or_if_either_does(one: Filter, other: Filter, attributes: dict[str, Value]) -> None:
    first, second = matches(one, attributes), matches(other, attributes)
    assert matches(Compound("and", (one, other)), attributes) == (first and second)
    assert matches(Compound("or", (one, other)), attributes) == (first or second)


@given(KEYS, VALUES, st.lists(VALUES, max_size=3).map(tuple), ATTRIBUTES)
def test_ne_and_nin_negate_eq_and_in(
    key: str, value: Value, values: tuple[Value, ...], attributes: dict[str, Value]
) -> None:
    assert matches(Comparison("eq", key, value), attributes) != matches(Comparison("ne", key, value), attributes)
    listed = matches(Comparison("in", key, values), attributes)
    assert listed != matches(Comparison("nin", key, values), attributes)
    assert listed == any(matches(Comparison("eq", key, one), attributes) for one in values)


@given(KEYS, VALUES, ATTRIBUTES)
def test_values_of_one_kind_are_ordered_and_mixed_kinds_are_not(
    key: str, value: Value, attributes: dict[str, Value]
) -> None:
    holds = {
        kind: matches(Comparison(kind, key, value), attributes)  # type: ignore[arg-type]  # all are literals
        for kind in ("eq", "gt", "gte", "lt", "lte")
    }
    ours = attributes.get(key)
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (ours, value))
    if numbers or (isinstance(ours, str) and isinstance(value, str)):
        assert [holds["lt"], holds["eq"], holds["gt"]].count(True) == 1
        assert holds["gte"] == (holds["gt"] or holds["eq"])
        assert holds["lte"] == (holds["lt"] or holds["eq"])
    else:
        assert not any(holds[kind] for kind in ("gt", "gte", "lt", "lte"))
        assert holds["eq"] == (isinstance(ours, bool) and ours is value)


@given(FILTERS, ATTRIBUTES, st.dictionaries(st.sampled_from("xyz"), VALUES))
def test_other_attributes_do_not_matter(one: Filter, attributes: dict[str, Value], more: dict[str, Value]) -> None:
    assert matches(one, attributes) == matches(one, attributes | more)
