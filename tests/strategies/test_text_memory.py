"""An owner's earlier answers as drafts: after a restart, for that owner alone, and not once they are erased."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.configs import changed
from lab.simulation import Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable, TextMemory
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import FakeEngine
from paceline.runtime.lookup_tables import TableStore, read_table
from paceline.sealing import PLAIN, Seal, StoreSeal
from paceline.strategies.registry import STRATEGIES
from tests.strategies.cases import VOCAB, job
from tests.strategies.pipeline.worlds import ALONE

GREEDY = SamplingParams(temperature=0.0)
TOKENS = 60


def forwards(table: LookupTable, name: str = "lookup_tree") -> tuple[float, list[int]]:
    """Of an answer that repeats nothing of itself, on an engine whose rows are free; and its tokens."""
    sampling = SamplingParams(temperature=1.0, seed=4)
    request = job(STRATEGIES[name], "cloud", sampling, branches=ALONE, max_tokens=TOKENS, eos_ids=frozenset())
    config = changed(request.config, table=table, stats=OnlineStats(), needs_dists=False)
    answer = Simulation(replace(request, config=config), {"cloud": FakeEngine(seed=1, spread=0.9)}).run(checks=False)
    assert answer.finished is not None
    return answer.finished.stats["forwards"], answer.tokens


@pytest.mark.parametrize("seal", [PLAIN, StoreSeal.new(bytes(32))], ids=["plain", "sealed"])
def test_an_answer_that_is_given_again_is_drafted_from_the_first_one(tmp_path: Path, seal: Seal) -> None:
    def store() -> TableStore:
        return TableStore(tmp_path, "bytes", VOCAB, seal=seal)

    tables = store()
    before, text = forwards(tables.table("anna"))
    assert tables.save() == 1
    (file,) = tmp_path.glob("owner-*")
    opened = read_table(file, seal)
    assert opened is not None and opened[1]["texts"][-1 - TOKENS : -1].tolist() == text
    assert (opened[1]["texts"].tobytes() in file.read_bytes()) == (seal is PLAIN)

    tables = store()  # another start
    assert forwards(tables.table("ben"))[0] == before
    again, same = forwards(tables.table("anna"))
    assert same == text and again < 0.5 * before
    assert asyncio.run(tables.erase("anna")) and not list(tmp_path.glob("owner-*"))
    assert tables.table("anna").memories == [] == store().table("anna").memories
    assert forwards(tables.table("anna")) == (before, text)


def test_a_pipeline_remembers_too_and_a_table_over_another_reads_both() -> None:
    below = LookupTable(VOCAB)
    before, _ = forwards(below, "pipeline")
    over = LookupTable(VOCAB, base=below)
    assert forwards(over, "pipeline")[0] < 0.5 * before
    assert over.memories == [over.texts, below.texts]
    over.erase()
    assert over.memories == [below.texts]


def test_what_is_oldest_is_forgotten_and_cursors_begin_anew() -> None:
    table = LookupTable(VOCAB)
    table.texts = TextMemory(max_tokens=20)
    loop = [1, 2, 3, 4, 5, 6, 7, 8]
    table.texts.add(loop)
    while table.texts.catch_up(3):
        pass
    drafter = NgramDrafter(table, GREEDY)
    for token in loop[:5]:
        drafter.observe(token)
    assert drafter.draft(2, 0).tokens == (6, 7)
    for start in (100, 120):
        table.texts.add(range(start, start + 18))
    assert len(table.texts) == 20 and table.texts.is_behind
    drafter.observe(6)
    assert drafter.draft(2, 0).tokens == (), "the former texts are gone"
    assert table.texts.catch_up(5) and not table.texts.catch_up(100)


@pytest.mark.parametrize("texts", [np.array([1.5]), np.array([[1]], np.int32), np.array([VOCAB], np.int32)])
def test_damaged_texts_are_refused_and_change_nothing(texts: np.ndarray) -> None:
    table = LookupTable(VOCAB)
    table.record(3, [5], [0.5])
    saved = table.arrays()
    fresh = LookupTable(VOCAB)
    with pytest.raises(ValueError, match="text"):
        fresh.load(saved | {"texts": texts})
    assert len(fresh) == 0 and fresh.memories == []
