"""Attention over pages: rows see what they see, plans of tiles, and which kernels compute it."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.torch_kernels import TorchKernels
from paceline.core.batching.segment import PlacedSegment, SeqId
from paceline.engine import layer_kernel
from paceline.engine.loader import load_engine
from paceline.engine.paged import engine as paged
from paceline.engine.paged.attention import backends
from paceline.engine.paged.attention.backends import (
    Attention,
    ModelAttention,
    Run,
    Tiled,
    choose_attention,
    make_attention,
)
from paceline.engine.paged.attention.tile_plan import (
    COLUMNS,
    Item,
    Operands,
    Split,
    StepShape,
    TileShape,
    ancestors,
    most_items,
    most_slots,
    plan_tiles,
)
from paceline.engine.paged.engine import PagedEngine
from paceline.engine.paged.kv_cache import SegmentSlots
from tests.engine.conftest import DEVICE, HERE
from tests.engine.paged.attention_cases import Case, Kind, case
from tests.engine.trials import extend, sequences

MIXED: list[Kind] = ["decode", "prompt", "tree", "decode", "part", "chain", "prompt", "part", "decode"]
SHAPES = {
    "qwen2.5-7b's heads": {"heads": 14, "kv_heads": 2, "dim": 128},
    "one head of K and V": {"heads": 24, "kv_heads": 1, "dim": 64},
    "every head its own": {"heads": 3, "kv_heads": 3, "dim": 64},
    "small window": {"heads": 4, "kv_heads": 2, "window": 7},
    "window beyond an item": {"heads": 4, "kv_heads": 2, "window": 90},
    "softcap and window": {"heads": 4, "kv_heads": 2, "softcap": 5.0, "window": 40},
    "odd dimensions": {"heads": 4, "kv_heads": 2, "dim": 24, "value_dim": 40},
}


@pytest.fixture(params=["gathered", "twin", "triton", "c"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def attend(name: str, given: Case, *, padded_to: int | None = None) -> torch.Tensor:
    model = ModelAttention([given.params], given.query.shape[1])
    if name == "triton":
        pytest.importorskip("triton", reason="triton is not installed: its kernels run neither here nor interpreted")
    chosen: Attention = TorchKernels() if name == "twin" else name  # type: ignore[assignment]  # one of them
    backend = make_attention(chosen, given.storage, model)
    query, key, value = given.query, given.key, given.value
    if padded_to is None:
        step = backend.prepare(given.flat)
    else:
        assert isinstance(backend, Tiled)
        plan = backend.plan(given.flat)
        step = backend.step(backend.send(given.flat, plan, StepShape.padded(padded_to, plan, backend.tiles)))
        more = padded_to - len(query)
        query, key, value = (torch.cat((each, each.new_ones(more, *each.shape[1:]))) for each in (query, key, value))
    with torch.inference_mode():
        return step.attending.attend(0, query, key, value, given.params)[: len(given.query)].cpu()


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_attend_to_what_they_see_and_nothing_else(name: str, shape: str) -> None:
    given = case(MIXED, 0, device=DEVICE, **SHAPES[shape])  # type: ignore[arg-type]
    torch.testing.assert_close(attend(name, given), given.expected(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kinds", [["decode"], ["decode", "part", "tree"], ["prompt"]], ids=str)
def test_tiles_of_long_sequences_are_split_and_combined(name: str, kinds: list[Kind]) -> None:
    given = case(kinds, 7, longest=900, device=DEVICE)
    torch.testing.assert_close(attend(name, given), given.expected(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_as_its_rounding(name: str, dtype: torch.dtype) -> None:
    if name == "triton" and DEVICE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cannot multiply bfloat16; float16 takes the same path")
    given = case(MIXED, 2, heads=14, dim=64, dtype=dtype, device=DEVICE)
    torch.testing.assert_close(attend(name, given).float(), given.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["twin", "triton"])
@pytest.mark.parametrize("window", [None, 30])
def test_padding_changes_no_row(name: str, window: int | None) -> None:
    given = case(["decode", "part", "decode", "chain"], 5, window=window, longest=500, device=DEVICE)
    found = attend(name, given, padded_to=96)
    torch.testing.assert_close(found, given.expected(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", ["gathered", "twin"])
def test_steps_of_many_answers_keep_their_rows_apart(name: str) -> None:
    """Answers with drafts beside answers without: segments of few sizes, in any order."""
    draw = random.Random(0)
    for seed in range(25):
        kinds: list[Kind] = draw.choices(["decode", "chain"], (3, 2), k=draw.randrange(2, 17))
        given = case(kinds, seed, longest=draw.choice((30, 100)), device=DEVICE)
        torch.testing.assert_close(attend(name, given), given.expected(), atol=2e-5, rtol=2e-4)


# ---- plans of tiles -------------------------------------------------------------------------------------------------
KINDS: tuple[Kind, ...] = ("prompt", "decode", "chain", "tree", "part")
kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=12)
shapes = st.builds(
    TileShape, group=st.sampled_from([1, 4, 7, 24, 71]), spread=st.integers(1, 40), window=st.sampled_from([None, 50])
)


@settings(max_examples=60)
@given(kinds=kinds, shape=shapes, seed=st.integers(0, 99))
def test_every_row_reads_every_column_that_it_sees_once(kinds: list[Kind], shape: TileShape, seed: int) -> None:
    flat = case(kinds, seed, longest=700).flat
    plan = plan_tiles(flat.segments, flat.num_rows, shape)
    segment_of = {row: each for each in flat.segments for row in range(each.first, each.first + each.num_rows)}
    read: dict[int, list[tuple[int, int]]] = {row: [] for row in segment_of}
    parts: dict[int, list[int]] = {row: [] for row in segment_of}
    slots: set[int] = set()
    for height, items in zip(shape.heights, plan.items, strict=True):
        assert len(items) <= most_items(flat.num_rows, shape)
        for item in items.tolist():
            slots_of = segment_of[item[Item.ROW]]
            segment = slots_of.segment
            assert 0 < item[Item.NUM_ROWS] <= height // shape.group
            assert item[Item.BEGIN] % COLUMNS == 0
            table = plan.pool[item[Item.TABLE] : item[Item.TABLE] + len(slots_of.blocks)]
            assert np.array_equal(table, slots_of.blocks)
            for at in range(item[Item.NUM_ROWS]):
                row = item[Item.ROW] + at
                read[row].append((item[Item.BEGIN], item[Item.END]))
                assert flat.positions[row] >= item[Item.LEAST]
                seen = segment.attention_mask(None)[row - slots_of.first]
                assert seen[: item[Item.FULL]].all(), "columns before FULL need no mask"
                if item[Item.SLOT] >= 0:
                    parts[row].append(item[Item.SLOT] + at)
                    assert item[Item.SLOT] + at not in slots
                    slots.add(item[Item.SLOT] + at)
    for row, ranges in read.items():
        slots_of = segment_of[row]
        visible = np.flatnonzero(slots_of.segment.attention_mask(shape.window)[row - slots_of.first])
        ranges.sort()
        assert ranges[0][0] <= visible[0] and ranges[-1][1] > visible[-1]
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
        first, stride, count = plan.splits[row]
        assert sorted(parts[row]) == [first + stride * part for part in range(count)]
        assert plan.splits[row, Split.COUNT] != 1
    assert len(slots) == plan.num_slots <= most_slots(flat.num_rows, shape)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=70), st.data())
def test_a_mask_has_a_bit_for_each_column_of_the_tree_only(draws: list[int], data: st.DataObject) -> None:
    parents = tuple(draw % (row + 1) - 1 for row, draw in enumerate(draws))
    new = data.draw(st.integers(1, len(parents)))
    segment = PlacedSegment(SeqId(0), 5000 + len(parents) - new, (1,) * new, parents, ())
    words = ancestors(segment)
    assert words.shape == (new, -(-len(parents) // 32)), "whatever the context is"
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : len(parents)]
    assert np.array_equal(bits.astype(bool), segment.mask())


def test_one_long_sequence_occupies_the_device_and_many_are_not_split() -> None:
    shape = TileShape(group=7, spread=132)
    alone = SegmentSlots(PlacedSegment(SeqId(0), 8000, (1,), None, (0,)), 0, np.arange(501))
    long = plan_tiles([alone], 1, shape)
    assert 100 < len(long.items[0]) <= 132
    many = plan_tiles(case(["decode"] * 200, 1).flat.segments, 200, shape)
    assert len(many.items[0]) < 240


def test_the_plan_of_a_step_does_not_grow_with_rows_times_columns() -> None:
    """64 trees of 8 rows behind 8,000 rows each: 64 x 8 x 8,000 cells of a mask, had it any."""
    parents = (-1, 0, 0, 1, 1, 2, 2, 3)
    placed = [PlacedSegment(SeqId(seq), 8000, (1,) * 8, parents, ()) for seq in range(64)]
    trees = [SegmentSlots(each, 8 * each.seq, np.arange(501)) for each in placed]
    plan = plan_tiles(trees, 512, TileShape(group=7, spread=132))
    assert plan.pool.size == 64 * (501 + 8 + 8), "block tables, a word a row, a position a column"


@pytest.mark.parametrize("group", [1, 7, 16, 17, 64, 71])
def test_a_tile_holds_all_query_heads_of_a_row(group: int) -> None:
    shape = TileShape(group=group, spread=8)
    assert all(shape.rows(height) >= 1 and height >= 16 and height & (height - 1) == 0 for height in shape.heights)
    assert len(set(shape.heights)) == len(shape.heights)


# ---- who attends ----------------------------------------------------------------------------------------------------
CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "is_installed", "expected"),
    [
        (CPU, torch.bfloat16, 128, True, "gathered"),
        (GPU, torch.bfloat16, 128, True, "triton"),
        (GPU, torch.float16, 64, True, "triton"),
        (GPU, torch.float32, 256, True, "triton"),
        (GPU, torch.bfloat16, 512, True, "gathered"),
        (GPU, torch.float64, 64, True, "gathered"),
        (GPU, torch.bfloat16, 128, False, "gathered"),
    ],
)
def test_a_gpu_gets_triton_where_it_can_and_a_warning_where_not(
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    is_installed: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if is_installed else None)
    monkeypatch.setattr(layer_kernel, "kernel", lambda: None)
    assert choose_attention(device, dtype, dim) == expected
    assert len(caplog.records) == (device == GPU and expected == "gathered")


def test_a_cpu_gets_the_kernel_in_c_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_kernel, "kernel", object)
    sizes = [(torch.float32, 64), (torch.bfloat16, 256), (torch.float32, 257), (torch.float64, 64)]
    assert [choose_attention(CPU, *each) for each in sizes] == ["c", "c", "gathered", "gathered"]


@pytest.mark.parametrize("fault", ["wrong numbers", "an error"])
def test_kernels_that_fail_the_test_at_load_are_replaced_with_one_warning(
    fault: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a GPU on which the kernels do not compile, or compute something else."""

    def attend(_: TorchKernels, operands: Operands, *__: object) -> None:
        if fault == "an error":
            raise ValueError("out of resources: shared memory")
        operands.output.fill_(torch.nan)  # which reaches K and V of the next layer

    monkeypatch.setattr(backends, "choose_attention", lambda *_: TorchKernels())
    monkeypatch.setattr(TorchKernels, "attend", attend)
    options = HERE._replace(backend="paged", kv_rows=256, graphs=False)
    engine = load_engine(checkpoint("llama"), options, name="llama")
    assert isinstance(engine, PagedEngine) and engine.attention == "gathered"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "llama: twin attention does not score as the model's plain forward does"
    ]
    free = engine.free_rows()
    with sequences(engine) as (seq,):
        assert all(np.isfinite(dist.probs).all() for dist in extend(engine, seq, [1, 2, 3]))
    assert engine.free_rows() == free == 256


def test_graphs_that_fail_the_test_at_load_are_left_out_and_the_kernels_stay(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(run: Run) -> Run:
        return lambda: run() * 0.0

    monkeypatch.setattr(backends, "choose_attention", lambda *_: TorchKernels())
    monkeypatch.setattr(paged, "capture_of", lambda *_: capture)
    engine = load_engine(checkpoint("llama"), HERE._replace(backend="paged", kv_rows=256), name="llama")
    assert isinstance(engine, PagedEngine) and engine.attention == "twin" and engine.graphs is None
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "llama: twin attention with replayed steps does not score as the model's plain forward does"
    ]
