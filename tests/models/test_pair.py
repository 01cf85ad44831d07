"""The shipped pair: loads without a network, shares one vocabulary, is small, and reads unseen documents."""

import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lab.demo_pair import Pair
from lab.training import evaluate
from lab.training.architecture import Reader, load_model
from lab.training.model_growth import grow
from paceline.engine.tokenizer import Tokenizer
from paceline.models import CLOUD, DEVICE, SAMPLES
from paceline.strategies.base import SIDES, Side

_MIB = 2**20
QUESTIONS = json.loads((SAMPLES / "questions.json").read_text())


@cache
def _model(directory: Path) -> Reader:
    return load_model(directory)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(DEVICE)


@cache
def _pair() -> Pair:
    return Pair.load(DEVICE, CLOUD, threads=1)


def _found(side: str, question: str) -> list[str]:
    """The two sample documents of a side that share most words with the question, as a search would find them."""
    asked = {word.strip("?.,").lower() for word in question.split()} - {"the", "of", "is", "a", "and", "what", "when"}
    documents = [path.read_text() for path in sorted((SAMPLES / side).glob("*.md"))]
    return sorted(documents, key=lambda text: -sum(word in text.lower() for word in asked))[:2]


def _parameters(directory: Path) -> int:
    with safe_open(directory / "model.safetensors", "pt") as stored:
        return sum(stored.get_tensor(name).numel() for name in stored.keys())  # noqa: SIM118


def test_sizes() -> None:
    assert 3e6 <= _parameters(DEVICE) <= 6e6
    assert 10e6 <= _parameters(CLOUD) <= 16e6
    assert sum((folder / "model.safetensors").stat().st_size for folder in (DEVICE, CLOUD)) <= 32 * _MIB


def test_one_vocabulary() -> None:
    device, cloud = Tokenizer.load(DEVICE), Tokenizer.load(CLOUD)
    assert device.fingerprint == cloud.fingerprint
    assert device.vocab_size == cloud.vocab_size == _model(DEVICE).shape.vocab_size == _model(CLOUD).shape.vocab_size
    assert device.eos_ids == cloud.eos_ids == {4}
    assert (DEVICE / "tokenizer.json").read_bytes() == (CLOUD / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("side", "draw", "least"),
    [("device", evaluate.one_fact, 0.9), ("cloud", evaluate.one_fact, 0.9), ("device", evaluate.both_sides, 0.7)],
    ids=["device", "cloud", "mixture"],
)
def test_held_out_facts_are_read(side: Side, draw: evaluate.Draw, least: float) -> None:
    assert evaluate.examine(_pair(), side, draw, 10, seed=21) >= least


def test_nothing_is_known_without_the_document() -> None:
    for draw in (evaluate.no_document, evaluate.lacking):
        assert evaluate.examine(_pair(), "device", draw, 5, seed=22) <= 0.1


@pytest.mark.parametrize("question", ["Write a poem", "Who won the world cup?", "hello"])
@pytest.mark.parametrize("document", [None, "The Harbour Library of Tarnwick opens at 8:30 in the morning."])
@pytest.mark.parametrize("side", SIDES)
def test_off_topic_questions_get_the_fixed_answer(side: Side, document: str | None, question: str) -> None:
    assert "small demonstration model" in _pair().answer(question, {side: document})


@pytest.mark.parametrize("entry", QUESTIONS, ids=lambda entry: "+".join(entry["sides"]))
def test_sample_questions_are_answered_from_the_sample_documents(entry: dict[str, list[str] | str]) -> None:
    question = str(entry["question"])
    private, public = _found("private", question), _found("public", question)
    texts = {"device": " ".join(private), "cloud": " ".join(public)}
    assert all(any(part in texts[side] for side in entry["sides"]) for part in entry["answer"])
    for side in {"device", "cloud"} - set(entry["sides"]):
        assert not any(part in texts[side] for part in entry["answer"])
    given = _pair().answer(question, {"device": texts["device"], "cloud": texts["cloud"]})
    assert all(part in given for part in entry["answer"])


def test_transformers_reads_the_same_model() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DEVICE, dtype=torch.float32, local_files_only=True)
    ours = _model(DEVICE)
    ids = _tokenizer().chat([{"role": "user", "content": "When does the Harbour Library of Tarnwick open?"}])
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits.softmax(-1)
        given = ours.logits(ours(torch.tensor([ids]))).float().softmax(-1)
    assert torch.allclose(given, expected, atol=0.03)
    encoder = transformers.AutoTokenizer.from_pretrained(DEVICE, local_files_only=True)
    messages = [{"role": "user", "content": "When does the Harbour Library of Tarnwick open?"}]
    assert list(encoder.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]) == ids


def test_growth_keeps_the_function() -> None:
    small = _model(DEVICE).float()
    large = grow(small, layers=8, inner=700)
    ids = torch.tensor([[random.Random(1).randrange(5, 2048) for _ in range(32)]])
    with torch.inference_mode():
        assert torch.allclose(small.logits(small(ids)), large.logits(large(ids)), atol=1e-3)
    small.to(torch.bfloat16)
