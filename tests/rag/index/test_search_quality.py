"""Search quality of MiniLM with BM25 on a small corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.rag.minilm import MiniLMEmbedder
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


def test_a_restart_finds_the_same(store: DocumentStore, tmp_path: Path, minilm: MiniLMEmbedder) -> None:
    for name, (text, _) in reversed(CORPUS.items()):
        with DocumentStore.open(tmp_path / "again", minilm) as again:
            again.add_text(name, text, zone="device")
    with DocumentStore.open(tmp_path / "again", minilm) as again:
        for _, question in CORPUS.values():
            one, other = store.search(question, 2), again.search(question, 2)
            assert [passage.document for passage in one] == [passage.document for passage in other]
            assert [passage.score for passage in one] == pytest.approx([passage.score for passage in other], abs=1e-5)
