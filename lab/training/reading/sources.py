"""Examples of the reader: from published question sets, and from the generated corpus of the causal pair.

SQuAD titles are split by hash, as for the causal pair. Documents are cut to some dozens of words around the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from lab.training.reading.clozes import cloze, sentences
from lab.training.reading.examples import Example, about, occurrences
from lab.training.reading.notes import notes_example, rivals_example
from lab.training.reading.topics import topic_example
from lab.training.texts import phrases
from lab.training.texts.corpus import ask, ask_two, draw_facts, missing_fact, write_document
from lab.training.texts.names import split_of
from lab.training.texts.squad import crop, records

Draw = Callable[[random.Random], Example]

_WH: Final = ("who", "what", "when", "where", "which", "how", "why")
_WORDS: Final = (40, 50, 60, 80, 100)  # of a part of a document
_OTHER_DOCUMENT: Final = 0.12  # share of questions asked of a document that does not hold their answer
_WITHOUT: Final = 0.08  # share of questions whose document lacks the sentence with the answer
_TWO: Final = 0.12  # share of questions that ask for a second thing, which the document may not hold


def squad(data: Path) -> list[Example]:
    """Its questions with whole paragraphs, those without an answer as well."""
    texts = {each["pid"]: str(each["text"]) for each in records(data / "squad" / "paragraphs.jsonl.gz")}
    found = []
    for each in records(data / "squad" / "questions.jsonl.gz"):
        if split_of(each["title"]) != "train":
            continue
        question, text = str(each["question"]).strip(), texts[each["pid"]]
        if each["answers"]:
            found.append(about(question, text, each["answers"]))
        elif not each["answerable"]:
            found.append(Example(question, text, ()))
    return [each for each in found if each is not None]


def natural_questions(data: Path) -> list[Example]:
    texts = {each["pid"]: str(each["text"]) for each in records(data / "nq_open" / "passages.jsonl.gz")}
    asked = [each for each in records(data / "nq_open" / "nq_open.jsonl") if each.get("gold_passage") in texts]
    found = [about(each["question"], texts[each["gold_passage"]], each["answers"]) for each in asked]
    return [each for each in found if each is not None]


def multi_hop(data: Path) -> list[Example]:
    """HotpotQA, 2WikiMultihopQA and MuSiQue: questions with that one of their paragraphs which holds the answer."""
    found: list[Example | None] = []
    folder = data / "two_sided_qa"
    texts = {each["pid"]: str(each["text"]) for each in records(folder / "both_sides_paragraphs.jsonl.gz")}
    for each in records(folder / "both_sides.jsonl"):
        for gold in each["gold"]:
            if len(each["answers"][0]) > 3:
                found.append(about(each["question"], texts[gold["pid"]], each["answers"]))
    for each in records(data / "musique" / "musique_train100.jsonl.gz"):
        for step in each["decomposition"]:
            if "#" not in step["question"] and ">>" not in step["question"]:
                text = each["paragraphs"][step["paragraph_idx"]]["text"]
                found.append(about(step["question"], text, [step["answer"]]))
    return [each for each in found if each is not None]


def chats(data: Path) -> list[Example]:
    """LiHua-World: questions for one fact of a chat, where the answer stands in the chat."""
    folder = data / "lihua_world"
    texts = {each["pid"]: str(each["text"]) for each in records(folder / "chats.jsonl.gz")}
    found = [
        about(each["question"], texts[each["gold_passages"][0]], [each["answer"]])
        for each in records(folder / "questions.jsonl")
        if each["type"] == "Single" and each["gold_passages"]
    ]
    return [each for each in found if each is not None]


def texts(data: Path) -> list[list[str]]:
    """Sentences of paragraphs without regard to their questions; of held-out titles of SQuAD none."""
    asked = records(data / "squad" / "questions.jsonl.gz")
    held_out = {each["pid"] for each in asked if split_of(each["title"]) != "train"}
    found = [each for each in records(data / "squad" / "paragraphs.jsonl.gz") if each["pid"] not in held_out]
    for name in ("nq_open/passages", "2wikimultihopqa/corpus", "two_sided_qa/both_sides_paragraphs"):
        found += records(data / f"{name}.jsonl.gz")
    split = [sentences(str(each["text"])) for each in found]
    return [text for text in split if len(text) > 1]


def without_answer(example: Example) -> Example:
    """The document without the sentences in which the answer stands: what is left does not answer, though it is about
    the same things."""
    answers = {example.document[slice(*span)].lower() for span in example.spans}
    kept = [each for each in sentences(example.document) if not any(answer in each.lower() for answer in answers)]
    return Example(example.question, " ".join(kept), ()) if kept else example


def cropped(rng: random.Random, example: Example) -> Example:
    """A part of the document, around the answer, if it has one."""
    text, words = example.document, rng.choice(_WORDS)
    answer = text[slice(*example.spans[0])] if example.spans else ""
    cut = crop(rng, text, answer or rng.choice(text.split()), words)
    return Example(example.question, cut, occurrences(cut, answer) if answer else ())


def real(rng: random.Random, examples: list[Example]) -> Example:
    """One of the questions; now and then of another's document, or together with another's question."""
    example = rng.choice(examples)
    shape = rng.random()
    other = rng.choice(examples)
    if shape < _OTHER_DOCUMENT:
        answer = example.document[slice(*example.spans[0])] if example.spans else ""
        spans = occurrences(other.document, answer) if answer else ()
        return cropped(rng, Example(example.question, other.document, spans))
    if shape > 1.0 - _WITHOUT:
        return without_answer(cropped(rng, example))
    example = cropped(rng, example)
    if shape < _OTHER_DOCUMENT + _TWO:
        pair = [example.question, other.question]
        rng.shuffle(pair)
        first, second = pair
        second = second[0].lower() + second[1:] if second.lower().startswith(_WH) else second
        both = f"{first.rstrip('?. ')}{rng.choice((' and', ', and'))} {second}"
        return Example(both, example.document, example.spans)
    return example


def generated(rng: random.Random) -> Example:
    """A question of the causal pair's corpus: for a fact, for two, for one that the document lacks, or off topic."""
    facts = draw_facts(rng, "train", rng.randint(1, 8))
    document = write_document(rng, "train", facts, 0.6 * rng.random())
    shape = rng.random()
    if shape < 0.6 or len(facts) < 2:
        fact = rng.choice(facts)
        return Example(ask(rng, fact), document, occurrences(document, fact.value))
    if shape < 0.8:
        stated, lacking = rng.choice(facts), missing_fact(rng, "train", facts)
        pair = [stated, lacking]
        rng.shuffle(pair)
        return Example(ask_two(rng, *pair), document, occurrences(document, stated.value))
    if shape < 0.97:
        return Example(ask(rng, missing_fact(rng, "train", facts)), document, ())
    return Example(phrases.outside_question(rng), document, ())


def mixture(data: Path) -> Iterator[tuple[float, Draw]]:
    """The sources of training with their shares."""
    everything = squad(data)
    answered = [each for each in everything if each.spans]
    hops, open_questions = multi_hop(data), natural_questions(data)
    prose = texts(data)
    talks = chats(data)
    yield 0.30, lambda rng: real(rng, answered)
    yield 0.06, lambda rng: real(rng, everything)
    yield 0.10, lambda rng: real(rng, open_questions)
    yield 0.04, lambda rng: real(rng, hops)
    yield 0.03, lambda rng: real(rng, talks)
    yield 0.05, lambda rng: cloze(rng, prose)
    yield 0.04, generated
    yield 0.08, notes_example
    yield 0.08, rivals_example
    yield 0.22, topic_example


def draw(rng: random.Random, sources: list[tuple[float, Draw]], count: int) -> Iterator[Example]:
    shares = [share for share, _ in sources]
    for _ in range(count):
        yield rng.choices([source for _, source in sources], shares)[0](rng)
