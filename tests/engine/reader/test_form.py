"""Answers of the shipped reader under a mask: JSON of a schema, and calls of functions, from documents and without."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.core.aggregation.weights import mix
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import Constraint, apply_mask
from paceline.engine.base import LoadedModel
from paceline.engine.grammar.compiler import GrammarCompiler
from paceline.engine.loader import load_model
from paceline.engine.reader.answer import number_in
from paceline.engine.reader.question import question_for
from paceline.models import READER

FERRY = "The ferry to Holm leaves at 8:30 in the morning from the north pier. Its captain is Ostrey."
CREW = "The crew of the ferry to Holm is Ann, Ben and Cleo. The ferry is 62 metres long."
SHOP = "The shop of Mrs Velda sells bread. It was painted green."
STRING, NUMBER, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
LIST = {"type": "array", "items": STRING}
MAYBE = {"anyOf": [STRING, {"type": "null"}]}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(str(READER))


@pytest.fixture(scope="module")
def grammars(model: LoadedModel) -> GrammarCompiler:
    return GrammarCompiler(model.tokenizer)


def schema(**properties: object) -> Constraint:
    fields = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return Constraint("json_schema", json.dumps(fields))


def functions(*given: tuple[str, str, Mapping[str, object]]) -> tuple[Constraint, str]:
    """The constraint that one is called, and what the API says of them in the system message."""
    tools = [{"name": name, "parameters": parameters, "strict": False} for name, _, parameters in given]
    lines = [
        json.dumps({"type": "function", "function": {"name": name, "description": about, "parameters": parameters}})
        for name, about, parameters in given
    ]
    said = (
        "# Tools\n\nFunctions that may be called:\n<tools>\n" + "\n".join(lines) + "\n</tools>\n\nTo call one:\n"
        "<tool_call>\n{}\n</tool_call>"
    )
    return Constraint("tools", json.dumps({"tools": tools, "required": True, "parallel": True})), said


def written(
    model: LoadedModel,
    grammars: GrammarCompiler,
    constraint: Constraint,
    question: str,
    documents: Sequence[str],
    system: str = "",
    limit: int = 160,
) -> str:
    """The greedy answer of the mixture of these documents' branches under the constraint, which must end by itself."""
    messages: list[Mapping[str, object]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    parts = [model.tokenizer.document_prompt(messages, each) for each in documents]
    prompts = [[*a, *b, *c] for a, b, c in parts] or [model.tokenizer.chat(messages)]
    mask, said = grammars.mask(constraint), list[int]()
    while len(said) < limit:
        dists = []
        for prompt in prompts:
            model.engine.begin(SeqId(1), prompt, "one")
            segment = Segment(SeqId(1), 0, (*prompt, *said))
            dist = model.engine.forward(Batch((segment,))).dists[0][0]
            model.engine.release(SeqId(1))
            dists.append(apply_mask(dist, mask.allowed(said)))
        token = mix(dists, [0.0] * len(dists)).argmax()
        if token in model.tokenizer.eos_ids:
            return model.tokenizer.decode(said)
        said.append(token)
    raise AssertionError(f"it does not end: {model.tokenizer.decode(said)}")


@pytest.mark.parametrize("others", [(), (SHOP, CREW, "Bread costs 3 euros.")])
@pytest.mark.parametrize(
    ("question", "properties", "right"),
    [
        (
            "When does the ferry to Holm leave, and where?",
            {"place": STRING, "time": STRING},
            ["the north pier", "8:30"],
        ),
        ("When does the ferry to Holm leave?", {"answer": STRING}, ["8:30"]),
        ("When does the ferry to Holm leave?", {"hour": NUMBER, "found": FLAG}, [8, True]),
        ("Who is the captain of the ferry?", {"captain": {"enum": ["Velda", "Ostrey", "nobody"]}}, ["Ostrey"]),
        ("Who is the captain of the ferry?", {"info": {"type": "object", "properties": {"captain": STRING}}}, None),
    ],
)
def test_a_property_is_what_the_document_that_knows_has_for_it(
    model: LoadedModel,
    grammars: GrammarCompiler,
    question: str,
    properties: dict[str, object],
    right: list[object] | None,
    others: tuple[str, ...],
) -> None:
    found: dict[str, Any] = json.loads(written(model, grammars, schema(**properties), question, (FERRY, *others)))
    assert found == ({"info": {"captain": "Ostrey"}} if right is None else dict(zip(properties, right, strict=True)))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12,50 EUR", "12.50"), ("1,234 boats", "1234"), ("1,234,567.5", "1234567.5"), ("1.234,50", "1234.50"),
        ("INV-2041", "2041"), ("-3 degrees", "-3"), ("10-15", "10"), ("0123", "123"), ("0.5 m", "0.5"),
        ("-0,5", "-0.5"),
    ],
)  # fmt: skip
def test_a_number_of_a_text_is_written_as_json_has_it(text: str, number: str) -> None:
    assert number_in(text) == number and json.loads(number) is not None


@pytest.mark.parametrize("documents", [(), (SHOP, CREW, "Bread costs 3 euros.")])
def test_where_no_document_knows_each_value_is_the_least_of_its_kind(
    model: LoadedModel, grammars: GrammarCompiler, documents: tuple[str, ...]
) -> None:
    wanted = schema(answer=STRING, year=NUMBER, found=FLAG, note=MAYBE, names=LIST)
    answer = json.loads(written(model, grammars, wanted, "When was the treaty of Utrecht signed?", documents))
    assert answer == {"answer": "", "year": 0, "found": False, "note": None, "names": []}


def test_a_list_has_the_items_of_a_text_that_is_one(model: LoadedModel, grammars: GrammarCompiler) -> None:
    question = "Who is the crew of the ferry to Holm?"
    assert json.loads(written(model, grammars, schema(crew=LIST), question, (CREW, SHOP))) == {
        "crew": ["Ann", "Ben", "Cleo"]
    }
    people = {"type": "array", "items": {"type": "object", "properties": {"name": STRING}, "required": ["name"]}}
    answer = json.loads(written(model, grammars, schema(crew=people), question, (CREW, SHOP)))
    assert [each["name"] for each in answer["crew"]] == ["Ann", "Ben", "Cleo"]


def test_what_is_to_be_extracted_may_stand_in_the_message(model: LoadedModel, grammars: GrammarCompiler) -> None:
    message = "Extract the person: John Smith is 30 years old and lives in Paris."
    answer = written(model, grammars, schema(name=STRING, age=NUMBER, city=STRING), message, ())
    assert json.loads(answer) == {"name": "John Smith", "age": 30, "city": "Paris"}


@pytest.mark.parametrize(
    "hard",
    [
        {"type": "string", "minLength": 20},
        {"type": "string", "pattern": "^[a-z]{3}$"},
        {"type": "number", "exclusiveMaximum": 0},
        {"type": "array", "items": STRING, "minItems": 3},
        {"$ref": "#"},
    ],
)
@pytest.mark.parametrize("documents", [(), (FERRY, SHOP)])
def test_an_answer_ends_whatever_a_schema_demands(
    model: LoadedModel, grammars: GrammarCompiler, hard: dict[str, object], documents: tuple[str, ...]
) -> None:
    """A schema that leads to itself is opened no deeper than it must be."""
    wanted = Constraint("loose_schema", json.dumps({"type": "object", "properties": {"a": STRING, "b": hard}}))
    question = "When does the ferry to Holm leave?"
    assert isinstance(json.loads(written(model, grammars, wanted, question, documents)), dict)


def test_what_a_front_end_asks_of_a_conversation_may_be_held_to_a_form(
    model: LoadedModel, grammars: GrammarCompiler
) -> None:
    task = "Generate a title for the chat.\n<chat_history>\nUSER: When does the Marabel leave?\n</chat_history>"
    assert json.loads(written(model, grammars, schema(title=STRING), task, (SHOP,))) == {"title": "Marabel"}


def test_any_object_has_one_answer(model: LoadedModel, grammars: GrammarCompiler) -> None:
    answer = written(model, grammars, Constraint("json_object"), "Who is the captain of the ferry?", (FERRY, SHOP))
    assert json.loads(answer) == {"answer": "Ostrey"}


HOURS = ("hours", "When a place opens.", {"type": "object", "properties": {"place": {"enum": ["ferry", "shop"]}}})
WEATHER = (
    "get_weather",
    "Current weather of a city.",
    {"type": "object", "properties": {"city": STRING}, "required": ["city"]},
)
SEARCH = ("search", "Searches documents.", {"type": "object", "properties": {"query": STRING}, "required": ["query"]})
FINAL = ("final_answer", "Ends.", {"type": "object", "properties": {"answer": STRING}, "required": ["answer"]})


@pytest.mark.parametrize("documents", [(), (FERRY, SHOP)])
@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("How is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("When is the final race?", "final_answer", {"answer": ""}),
        ("Please search for the lease of the barn.", "search", {"query": "the lease of the barn"}),
    ],
)
def test_a_required_call_is_made_once_and_whole(
    model: LoadedModel,
    grammars: GrammarCompiler,
    question: str,
    name: str,
    arguments: dict[str, str],
    documents: tuple[str, ...],
) -> None:
    constraint, system = functions(HOURS, WEATHER, SEARCH, FINAL)
    answer = written(model, grammars, constraint, question, documents, system)
    head, call, tail = answer.split("\n")
    assert (head, tail) == ("<tool_call>", "</tool_call>")
    assert json.loads(call) == {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("name", "parts", "asked"),
    [
        ("time", ["When does it open?"], "When does it open?"),
        ("openingTime", ["Who built it?", "When does it open?"], "When does it open?"),
        ("place", ["When does the ferry leave?"], "Where does the ferry leave?"),
        ("captain_name", ["Tell me of the ferry?"], "What is the captain name? Tell me of the ferry?"),
        ("captain", ["Who built it?", "Who is the captain?"], "Who is the captain?"),
        ("", ["Who built it?"], "Who built it?"),
    ],
)
def test_what_is_asked_for_a_property_follows_from_its_name(name: str, parts: list[str], asked: str) -> None:
    assert question_for(name, parts) == asked
