"""Search quality of MiniLM with BM25 on a small corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.rag.embedder import MiniLMEmbedder
from paceline.rag.index import BM25Index
from paceline.rag.store.documents import DocumentStore

# Twelve documents in four groups of similar ones, each with a question in other words.
CORPUS = {
    "flat.md": (
        "# Tenancy agreement\n\nThe flat at 14 Mill Lane is let to Ann Bell from 1 March. The rent is 820 euros a "
        "month, and a deposit of three months' rent was paid.",
        "How much do I pay every month for my apartment?",
    ),
    "garage.md": (
        "# Garage contract\n\nParking space 7 in the cellar of 14 Mill Lane costs 60 euros a month. "
        "Either party may give four weeks' notice.",
        "What does the place for my car cost?",
    ),
    "insurance.md": (
        "# Home contents insurance\n\nThe policy covers theft, fire and water damage up to 40,000 euros. "
        "Damage must be reported within seven days.",
        "How quickly must I tell the insurance company about a burglary?",
    ),
    "dentist.txt": (
        "Visit to Dr Okafor on 3 May: one filling replaced on the upper left, next check in November.",
        "When should my teeth be looked at again?",
    ),
    "allergy.txt": (
        "Allergy test of 12 April: strong reaction to birch pollen and hazelnut, none to milk or wheat.",
        "Which nuts must I avoid eating?",
    ),
    "prescription.txt": (
        "Prescription by Dr Haas: one tablet of amlodipine 5 mg each morning against high blood pressure.",
        "What medicine do I take for hypertension?",
    ),
    "ferry.txt": (
        "The ferry from Piombino to Elba sails every hour in summer and takes sixty minutes.",
        "How long is the crossing to the island?",
    ),
    "train.txt": (
        "The night train to Lisbon leaves from platform 4 at 21:43 and has a dining car.",
        "At what time does the sleeper to Portugal depart?",
    ),
    "hotel.txt": (
        "The guest house Albergo Rosa is booked for two people from 8 to 12 June, breakfast included.",
        "Where are we staying in summer, and is there a morning meal?",
    ),
    "bread.md": (
        "# Rye bread\n\nMix 500 g of rye flour with the sourdough, let it rise for twelve hours and bake it for an "
        "hour at 220 degrees.",
        "How hot must the oven be for the loaf?",
    ),
    "router.md": (
        "# Router\n\nTo reset it, hold the small button on the back for ten seconds until the lamp is red.",
        "The wifi box does not respond any more, how can I restore it?",
    ),
    "bicycle.md": (
        "# Bicycle\n\nThe frame number is WX-20417. The chain was changed in August, tyres need 4.5 bar.",
        "How many bar do the tyres of my bicycle need?",
    ),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, minilm: MiniLMEmbedder) -> DocumentStore:
    store = DocumentStore.open(tmp_path_factory.mktemp("quality") / "store", minilm)
    for name, (text, _) in CORPUS.items():
        store.add_text(name, text, zone="device")
    return store


@pytest.mark.parametrize("name", CORPUS)
def test_each_question_finds_its_document_first(name: str, store: DocumentStore) -> None:
    found = store.search(CORPUS[name][1], 3)
    assert [passage.document for passage in found][:1] == [name], found


@pytest.mark.parametrize(
    "question",
    ["Who won the battle of Hastings?", "How are prime numbers distributed?", "Explain quantum entanglement."],
)
def test_a_question_that_no_document_answers_finds_none(question: str, store: DocumentStore) -> None:
    assert store.search(question, 3) == []


PARTS = [1000 + 37 * i for i in range(24)]
PHRASES = [
    "{x}",
    "Which pump does part {x} fit?",
    "Good morning, could you please be so kind and tell me what you know about {x}? Thank you very much in advance.",
    "A colleague, who is on holiday until the end of the month, asked me to look something up, and I am not sure where "
    "it is written: what do our documents say about {x}, and who or what belongs to it?",
    "Können Sie mir bitte sagen, was in den Unterlagen über {x} steht?",
]


def _first(store: DocumentStore, phrase: str, spellings: dict[str, str]) -> int:
    """Of how many names the document is found first."""
    found = (store.search(phrase.format(x=spelling), 2) for spelling in spellings.values())
    return sum(
        [each.document for each in passages][:1] == [name] for name, passages in zip(spellings, found, strict=True)
    )


def _filled(folder: Path, minilm: MiniLMEmbedder, texts: dict[str, str]) -> DocumentStore:
    """A store of these documents and of others."""
    store = DocumentStore.open(folder, minilm)
    for name, text in [*((name, text) for name, (text, _) in CORPUS.items()), *texts.items()]:
        store.add_text(name, text, zone="device")
    return store


def test_a_part_number_in_any_question_finds_its_document_first(tmp_path: Path, minilm: MiniLMEmbedder) -> None:
    texts = {
        f"part{i}.txt": f"Part PPR-{n} fits pump {i}A. It is stored in aisle {i} and is ordered twice a year."
        for i, n in enumerate(PARTS)
    }
    with _filled(tmp_path, minilm, texts) as store:
        for spelling in ("PPR-{}", "ppr {}", "PPR{}"):
            names = {f"part{i}.txt": spelling.format(n) for i, n in [*enumerate(PARTS)][::12]}
            assert [_first(store, phrase, names) for phrase in PHRASES] == [len(names)] * len(PHRASES)


NUMBERS = {
    "invoice.txt": ("Invoice 2024-00317 was paid after a reminder.", "202400317"),
    "invoice2.txt": ("Invoice 2024-00318 was paid after a reminder.", "2024-00318"),
    "amount.txt": ("The bill amounts to 1,284.50 euros.", "1284.50"),
    "amount2.txt": ("The bill amounts to 1,294.50 euros.", "1.294,50"),
    "phone.txt": ("The workshop has the number +44 20 7946 0958.", "020 7946 0958"),
    "phone2.txt": ("The workshop has the number +44 20 7946 0985.", "+442079460985"),
    "phone3.txt": ("The workshop has the number 020 7946 0997.", "+44 20 7946 0997"),
    "error.txt": ("Error code 0x80070057 means a bad parameter.", "80070057"),
    "error2.txt": ("Error code 0x80070075 means a bad parameter.", "0x80070075"),
    "version.txt": ("Version v2.14.3 mended the export.", "2.14"),
    "version2.txt": ("Version v2.41.3 mended the export.", "2.41.3"),
    "date.txt": ("2025-10-29 the pump was exchanged.", "29 October"),
    "date2.txt": ("2025-11-29 the pump was exchanged.", "November 29th, 2025"),
}


def test_a_number_in_any_question_finds_its_document_however_it_is_written(
    tmp_path: Path, minilm: MiniLMEmbedder
) -> None:
    with _filled(tmp_path, minilm, {name: text for name, (text, _) in NUMBERS.items()}) as store:
        spellings = {name: spelling for name, (_, spelling) in NUMBERS.items()}
        assert [_first(store, phrase, spellings) for phrase in PHRASES] == [len(NUMBERS)] * len(PHRASES)


def test_one_of_several_is_found_by_their_word() -> None:
    index = BM25Index(np.array([1, 2, 3]), ["The quince tree", "Three cherries", "A key, and glass of the bus"])
    asked = ("quinces", "cherry", "keys", "glass", "bus", "What did they have to be?")
    assert [[hit.id for hit in index.search(word, 2)] for word in asked] == [[1], [2], [3], [3], [3], []]


def test_ligatures_broken_words_and_scripts_without_blanks_are_found(tmp_path: Path, minilm: MiniLMEmbedder) -> None:
    texts = {
        "ligature.txt": "The oﬃce of Mr Griﬃn has a ﬁling cabinet.",
        "broken.txt": "The pump needs main-\ntenance of its hydrau-\nlic parts.",
        "smith.txt": "铁匠赵强在青岛打造马蹄铁。",
        "baker.txt": "面包师李娜每天早上烤四十个面包。",
        "keeper.txt": "灯塔看守人王伟住在大连。",
    }
    asked = {"ligature.txt": "Griffin", "broken.txt": "maintenance", "smith.txt": "赵强", "baker.txt": "李娜是谁?"}
    with _filled(tmp_path, minilm, texts) as store:
        assert _first(store, "{x}", asked) == len(asked)


def test_an_index_is_built_without_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO"):
        assert BM25Index(np.array([1, 2]), ["a red boat", "the key"]).search("boat", 1)
    assert not caplog.records and capfd.readouterr() == ("", "")
