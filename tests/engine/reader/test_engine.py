"""The shipped reader: what it takes from a prompt, and prompts that are no conversation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import LoadedModel, TextModel
from paceline.engine.loader import load_model
from paceline.engine.reader.answer import NOTHING
from paceline.engine.reader.engine import PromptReader
from paceline.engine.reader.pointer import Pointer, SpanReading
from paceline.engine.reader.question import ABILITIES, ENGLISH_ONLY
from paceline.engine.tokenizer import Tokenizer
from paceline.models import DEVICE, READER
from paceline.rag.prompt import Messages

NOTE = "The spare key hangs behind the bird feeder. The wifi password is blue-kettle-71."


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(str(READER))


def said(question: str) -> Messages:
    return [{"role": "user", "content": question}]


def prompt_about(tokenizer: TextModel, messages: Messages) -> list[int]:
    return [token for part in tokenizer.document_prompt(messages, NOTE) for token in part]


def written(model: LoadedModel, prompt: Sequence[int], limit: int = 48) -> str:
    tokens: list[int] = list(prompt)
    while len(tokens) < len(prompt) + limit:
        dist = model.engine.forward(Batch((Segment(SeqId(1), 0, tuple(tokens)),))).dists[0][0]
        model.engine.release(SeqId(1))
        tokens.append(dist.argmax())
        if tokens[-1] in model.tokenizer.eos_ids:
            break
    return model.tokenizer.decode(tokens[len(prompt) :])


def test_it_answers_from_the_document_of_its_prompt(model: LoadedModel) -> None:
    prompt = prompt_about(model.tokenizer, said("What is the wifi password?"))
    assert written(model, prompt) == "blue-kettle-71."


def test_without_a_document_it_says_that_it_finds_nothing(model: LoadedModel) -> None:
    assert written(model, model.tokenizer.chat(said("What is the wifi password?"))) == f"{NOTHING}."


def test_without_a_document_it_reads_what_the_user_has_written(model: LoadedModel) -> None:
    assert "blue-kettle-71" in written(model, model.tokenizer.chat(said(f"{NOTE}\nWhat is the wifi password?")))


def test_a_greeting_has_the_same_answer_with_any_document_and_with_none(model: LoadedModel) -> None:
    for prompt in (prompt_about(model.tokenizer, said("Hello!")), model.tokenizer.chat(said("Hello!"))):
        assert written(model, prompt, limit=120) == f"{ABILITIES}."
    assert f"{ABILITIES}" in model.engine.info.refusals, "it cites nothing"


def test_a_question_in_another_language_is_told_which_one_it_reads(model: LoadedModel) -> None:
    assert written(model, prompt_about(model.tokenizer, said("Wo ist der Hund?"))) == f"{ENGLISH_ONLY}."


@pytest.mark.parametrize("text", ["", "Once upon a time", "<|assistant|>", "<|end|><|user|><|user|>"])
def test_a_prompt_that_is_no_conversation_ends_soon(model: LoadedModel, text: str) -> None:
    prompt = model.tokenizer.raw(text) if text else [0]
    assert len(written(model, prompt, limit=24)) < 60


def test_document_and_question_are_taken_from_the_prompt() -> None:
    tokenizer = Tokenizer.load(READER)
    reader = PromptReader(tokenizer)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "I lost it. Where is <|end|> the key?"},
    ]
    prompt = prompt_about(tokenizer, messages)
    assert reader.read(prompt)[:2] == (NOTE, "I lost it. Where is <|end|> the key?")
    assert reader.read(tokenizer.chat(messages)).document == "Be brief.\nI lost it."
    assert reader.read([])[:2] == ("", "")


def test_its_vocabulary_is_that_of_the_causal_pair() -> None:
    assert Tokenizer.load(READER).fingerprint == Tokenizer.load(DEVICE).fingerprint


def test_what_another_owner_has_had_read_is_read_anew(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of an answer tells which passages others have asked about."""
    readings: list[str] = []

    def counted(pointer: Pointer, question: str, document: str) -> SpanReading:
        readings.append(document)
        return read(pointer, question, document)

    read = Pointer.read
    monkeypatch.setattr(Pointer, "read", counted)
    prompt = prompt_about(model.tokenizer, said("Who fed the bird at the feeder?"))
    numbers = []
    for owner in ("ann", "bert", "ann", None, None):
        if owner is not None:
            model.engine.begin(SeqId(1), prompt, owner)
        for start, rows in ((0, prompt), (len(prompt), model.tokenizer.encode("I find"))):
            model.engine.forward(Batch((Segment(SeqId(1), start, tuple(rows)),)))
        model.engine.release(SeqId(1))
        numbers.append(len(readings))
    assert numbers[:3] == [1, 2, 2], "each owner's is kept for that owner"


def test_marks_of_functions_without_end_are_read_in_one_pass() -> None:
    tokenizer = Tokenizer.load(READER)
    reader = PromptReader(tokenizer)
    hostile = "# Tools\n" * 2000 + "<tools>\n" * 2000 + "\n</tools>" * 2000
    for role, text in (("system", hostile), ("user", "<tool_response>\n" * 5000 + "Who?")):
        found = reader.read(tokenizer.chat([{"role": role, "content": text}, {"role": "user", "content": "Why?"}]))
        assert found.tools == () and found.message == "Why?"
    told = '# Tools\nx\n<tools>\n{"function": {"name": "find"}}\n</tools>\ny</tool_call>\nBe kind.'
    found = reader.read(tokenizer.chat([{"role": "system", "content": told}, {"role": "user", "content": "Why?"}]))
    assert found.tools == (("find", ""),) and found.document == "Be kind."
