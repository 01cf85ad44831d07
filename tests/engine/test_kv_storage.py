"""Memory of the KV cache on a CPU: taken as rows are written, and not filled by prompts that came and went."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.loader import EngineOptions, load_engine
from paceline.engine.paged.kv_cache import KvStorage


def resident_bytes(address: int) -> int:
    """Resident bytes of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, stop = line.split(" ", 1)[0].partition("-")
        if dash:
            inside = int(first, 16) <= address < int(stop, 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
def test_a_row_takes_pages_of_its_own_not_a_huge_page_of_every_layer() -> None:
    storage = KvStorage(4096, 16, layers=4, kv_heads=2, key_dim=64, value_dim=64, like=torch.zeros(1))
    storage.keys[:, 0] = storage.values[:, 0] = 1.0
    for tensor in (storage.keys, storage.values):
        assert tensor.nbytes > 100 << 20
        assert resident_bytes(tensor.data_ptr()) < 1 << 20
        assert not tensor[:, 1:3].any(), "masked columns must be finite"


@pytest.mark.parametrize(
    ("options", "kept"), [(EngineOptions(device="cpu"), 0), (EngineOptions(device="cpu", kv_mib=64), 80)]
)
def test_unless_memory_is_given_only_four_contexts_stay_for_later_prompts(
    options: EngineOptions, kept: int, checkpoint: Callable[[str], Path]
) -> None:
    """A context of this model is 96 rows."""
    engine = load_engine(checkpoint("llama"), options, name="tiny")
    tokens = [(7 * i) % 97 for i in range(81)]
    for number in range(6):  # of five blocks each
        seq = SeqId(number)
        engine.begin(seq, tokens, f"owner {number}")
        engine.forward(Batch((Segment(seq, 0, tuple(tokens), logits="none"),)))
        engine.release(seq)
    assert engine.begin(SeqId(110), tokens, "owner 5") == 80
    assert engine.begin(SeqId(111), tokens, "owner 0") == kept
