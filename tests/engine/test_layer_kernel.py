"""Parts of a layer by the kernel in C: what torch computes, and a row's bits alone and beside others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from paceline.core.batching.segment import Batch, Segment
from paceline.core.sampling.dist import Dist
from paceline.engine import layer_kernel
from paceline.engine.base import Engine
from paceline.engine.layer_kernel import FORMATS
from paceline.engine.loader import EngineOptions, load_engine, quiet
from paceline.engine.paged.attention.backends import ModelAttention, make_attention
from paceline.engine.paged.packed_linear import FusedLayer
from paceline.engine.tensors import dists
from paceline.engine.weights import FloatRows, Scratch, StoredLinear
from tests.engine.checkpoints import sizeable
from tests.engine.conftest import load_stored
from tests.engine.paged.attention_cases import Kind, case
from tests.engine.paged.test_attention import attend
from tests.engine.trials import assert_same, scratch, sequences
from tests.kernels import built

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a result of size 1
sizes = st.integers(1, 70)
formats = st.sampled_from(list(FORMATS))


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> Iterator[None]:
    """The kernel of the sources, whatever the installation has."""
    module = built("paceline.engine._layer_kernel")
    if not module.is_supported():
        pytest.skip("this processor has no AVX2")

    def found() -> ModuleType:
        return module

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layer_kernel, "kernel", found)
        yield


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.full((len(x), len(weights) + 2), torch.nan)  # part of a wider result
    layer_kernel.linear(
        x, layer_kernel.parts_of([weights]), None if bias is None else functional.pad(bias, (1, 1)), y, 1
    )
    assert y[:, [0, -1]].isnan().all()
    return y[:, 1:-1]


@settings(max_examples=80)
@given(rows=sizes, outputs=sizes, inputs=st.integers(1, 1200), dtype=formats, seed=st.integers(0, 99))
def test_a_linear_is_the_product_and_its_rows_have_the_same_bits_alone(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int
) -> None:
    x, bias = numbers(seed, rows, inputs), numbers(seed + 1, outputs)
    weights = numbers(seed + 2, outputs, inputs, dtype=dtype)
    found = product(x, weights, bias)
    expected = functional.linear(x.double(), weights.double(), bias.double())
    torch.testing.assert_close(found.double(), expected, atol=2e-6 * inputs**0.5 * 4, rtol=1e-5)
    row, output = seed % rows, seed % outputs
    assert torch.equal(product(x[row : row + 1].clone(), weights, bias)[0], found[row])
    assert torch.equal(product(x[row:].clone(), weights[output:].clone(), bias[output:].clone()), found[row:, output:])


@contextmanager
def computing(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_threads_change_no_bit() -> None:
    x, weights = numbers(0, 9, 640), numbers(1, 1000, 640, dtype=torch.bfloat16)
    found = product(x, weights)
    with computing(3):
        assert torch.equal(product(x, weights), found)


@given(rows=sizes, heads=st.integers(1, 5), width=sizes, dtype=formats, seed=st.integers(0, 99))
def test_norms_of_rows_and_of_heads_are_torch_s(
    rows: int, heads: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    wider = numbers(seed, rows, heads + 1, width, dtype=dtype)  # a view of what is projected
    weight = numbers(seed + 1, width, dtype=dtype)
    expected = functional.rms_norm(wider.float(), (width,), weight.float(), 1e-5)
    off = 4 * ROUNDING[dtype]
    torch.testing.assert_close(
        layer_kernel.norm(wider[:, :heads], weight, 1e-5).float(), expected[:, :heads], atol=off, rtol=off
    )
    flat = wider[:, 0].contiguous()
    torch.testing.assert_close(layer_kernel.norm(flat, weight, 1e-5).float(), expected[:, 0], atol=off, rtol=off)


@given(rows=sizes, heads=st.integers(1, 5), half=st.integers(1, 40), dtype=formats, seed=st.integers(0, 99))
def test_heads_turn_in_place_and_others_stay(rows: int, heads: int, half: int, dtype: torch.dtype, seed: int) -> None:
    wider = numbers(seed, rows, heads + 1, 2 * half, dtype=dtype)
    cos, sin = (numbers(seed + i, rows, 1, 2 * half, dtype=dtype).clamp(-1, 1) for i in (1, 2))
    x = wider[:, :heads].float()
    expected = x * cos.float() + x.roll(half, -1) * sin.float()
    last = wider[:, heads].clone()
    layer_kernel.turn(wider[:, :heads], cos, sin)
    off = 4 * ROUNDING[dtype]
    torch.testing.assert_close(wider[:, :heads].float(), expected, atol=off, rtol=off)
    assert torch.equal(wider[:, heads], last)


@given(rows=sizes, width=sizes, dtype=formats, size=st.sampled_from([0.1, 3.0, 300.0]), seed=st.integers(0, 99))
def test_gates_are_torch_s(rows: int, width: int, dtype: torch.dtype, size: float, seed: int) -> None:
    x = (size * numbers(seed, rows, 2 * width)).to(dtype)
    gates, up = x.float().chunk(2, -1)
    expected = functional.silu(gates) * up
    fits = expected.abs() < 6e4  # float16 ends
    found = layer_kernel.gate(x).float()
    torch.testing.assert_close(found[fits], expected[fits], atol=4 * ROUNDING[dtype] * size, rtol=4 * ROUNDING[dtype])


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["decode", "chain", "part", "prompt"]), min_size=2, max_size=8),
    st.integers(0, 99),
    st.sampled_from([200, 1000]),
    st.sampled_from([1, 4]),
)
def test_a_row_of_attention_has_the_same_bits_alone(kinds: list[Kind], seed: int, longest: int, threads: int) -> None:
    """Also where several threads share the columns of one long sequence."""
    given_case = case(
        kinds, seed, heads=6, kv_heads=2, dim=40, longest=longest, window=None if seed % 2 else longest // 4
    )
    backend = make_attention("c", given_case.storage, ModelAttention([given_case.params], 6))

    def attended(flat: object, rows: slice) -> Tensor:
        step = backend.prepare(flat)  # type: ignore[arg-type]
        with torch.inference_mode():
            return step.attending.attend(
                0, given_case.query[rows], given_case.key[rows], given_case.value[rows], given_case.params
            )

    flat = given_case.flat
    together = attended(flat, slice(None)).clone()
    for slots in flat.segments:
        rows = slice(slots.first, slots.first + slots.num_rows)
        alone = type(slots)(slots.segment, 0, slots.blocks)
        part = type(flat)([alone], flat.tokens[rows], flat.positions[rows], flat.slots[rows], flat.logits_rows[:0])
        with computing(threads):
            assert torch.equal(attended(part, rows), together[rows])


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kinds", [["decode"], ["chain", "decode"], ["part", "tree"], ["prompt"]])
def test_threads_that_share_a_long_sequence_change_no_bit(
    kinds: list[Kind], window: int | None, dtype: torch.dtype
) -> None:
    """Attention is as it is defined, with a softcap and heads of K and V of different sizes."""
    sizes = {"heads": 14, "kv_heads": 2, "dim": 40, "value_dim": 24, "window": window, "softcap": 20.0}
    for seed in range(3):
        given_case = case(kinds, seed, **sizes, longest=1500, dtype=dtype)  # type: ignore[arg-type]
        found: list[Tensor] = []
        for threads in (1, 8):
            with computing(threads):
                found.append(attend("c", given_case))
        assert torch.equal(*found)
        expected = given_case.expected()
        torch.testing.assert_close(
            found[0].double(), expected.double(), atol=8 * ROUNDING[dtype], rtol=8 * ROUNDING[dtype]
        )


def test_scores_that_are_below_every_number_weigh_nothing() -> None:
    """Also where they are all that a row sees of some columns."""
    given_case = case(["decode"], 0, longest=1500, dtype=torch.float16)
    keys, _ = given_case.storage.by_layer[0]
    blocks = torch.from_numpy(given_case.flat.segments[0].blocks)
    given_case.query.fill_(1.0)
    keys[(blocks[:16, None] * 16 + torch.arange(16)).ravel()] = -torch.inf
    assert len(blocks) > 17 and attend("c", given_case).isfinite().all()


LONG = 280  # more columns than the kernel attends to at a time


def with_long_context(checkpoint: Path, folder: Path) -> Path:
    found = shutil.copytree(checkpoint, folder / "model") / "config.json"
    found.write_text(json.dumps(json.loads(found.read_text()) | {"max_position_embeddings": 2 * LONG}))
    return found.parent


@pytest.mark.parametrize("name", ["llama", "qwen2windowed", "qwen3moe"])
def test_rows_of_an_engine_have_the_same_bits_in_every_batch(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = with_long_context(checkpoint(f"half-{name}"), tmp_path)
    engine = load_stored(path, name, EngineOptions(backend="paged", kv_rows=1024))
    tokens = [(7 * i * i + 3 * i) % 97 for i in range(LONG)]
    whole = scratch(engine, tokens)
    with sequences(engine, 3) as seqs:
        parts: list[Dist] = []
        for first, stop in ((0, 1), (1, 9), (9, 260), (260, LONG)):
            others = [Segment(seq, first, tuple(i % 97 for i in range(first, stop)), logits="all") for seq in seqs[1:]]
            mine = Segment(seqs[0], first, tuple(tokens[first:stop]), logits="all")
            parts += engine.forward(Batch((others[0], mine, others[1]))).dists[1]
    for alone, beside in zip(whole, parts, strict=True):
        assert (alone.probs == beside.probs).all()


def mixed_batches(engine: Engine) -> list[NDArray[np.floating]]:
    """Probabilities of all rows of a prompt, then of a chain, a tree and a single row beside each other."""
    found: list[NDArray[np.floating]] = []
    with sequences(engine, 3) as (one, other, third):
        for batch in (
            Batch((Segment(one, 0, tuple(i % 97 for i in range(LONG)), logits="all"), Segment(other, 0, (5, 6, 7)))),
            Batch(
                (
                    Segment(one, LONG, (4, 5, 6, 7), (-1, 0, 0, 1), logits="all"),
                    Segment(other, 3, (8,), logits="all"),
                    Segment(third, 0, tuple(range(20)), logits="all"),
                )
            ),
        ):
            found += [dist.probs for dists in engine.forward(batch).dists for dist in dists]
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2windowed", "qwen3", "mistral"])
def test_layers_in_one_call_have_the_bits_of_layers_one_by_one(
    name: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = EngineOptions(backend="paged", kv_rows=512)
    calls: list[int] = []
    layers = layer_kernel.layers
    monkeypatch.setattr(layer_kernel, "layers", lambda *given, **named: calls.append(layers(*given, **named) or 1))
    path = with_long_context(checkpoint(f"half-{name}"), tmp_path)
    whole = load_stored(path, name, options)
    found = mixed_batches(whole)
    assert calls
    most = 2 * torch.get_num_threads() + 1  # some are not running where others wait
    with computing(most):
        whole = load_stored(path, name, options._replace(threads=most))
        for free in (most + 1, 1, 2) * 3:
            monkeypatch.setattr(layer_kernel, "free_cores", lambda free=free: free)
            assert all(map(np.array_equal, found, mixed_batches(whole)))
            assert torch.get_num_threads() == min(free, most)
    monkeypatch.setattr(FusedLayer, "record", lambda _: None)
    calls.clear()
    assert all(map(np.array_equal, found, mixed_batches(load_stored(path, name, options))))
    assert not calls


def test_without_the_kernel_torch_computes_the_same(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [(5 * i * i + i) % 97 for i in range(40)]
    options = EngineOptions(backend="paged", kv_rows=64)
    found = scratch(load_stored(checkpoint("half-llama"), "llama", options), tokens)
    monkeypatch.setattr(layer_kernel, "kernel", lambda: None)
    assert_same(scratch(load_stored(checkpoint("half-llama"), "llama", options), tokens), found)
    linear = StoredLinear([FloatRows(numbers(0, 50, 30, dtype=torch.bfloat16))], numbers(1, 50), Scratch())
    x = numbers(2, 4, 30)
    expected = functional.linear(x, numbers(0, 50, 30, dtype=torch.bfloat16).float(), numbers(1, 50))
    torch.testing.assert_close(linear(x), expected)


def test_what_is_no_number_stays_visible() -> None:
    given_case = case(["decode", "prompt"], 3, heads=4, kv_heads=2, dim=16)
    for value in (torch.nan, torch.inf):
        query = given_case.query.clone()
        query[0] = value
        found = attend("c", replace(given_case, query=query))
        assert found[0].isnan().any() and found[1:].isfinite().all()


def test_weights_in_float64_are_converted(tmp_path: Path) -> None:
    with quiet():
        model = AutoModelForCausalLM.from_config(sizeable(tied=False)).double()
        model.save_pretrained(tmp_path)
    tokens = [(5 * i * i + i) % 97 for i in range(12)]
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    engine = load_engine(tmp_path, EngineOptions(backend="paged", kv_rows=64, device="cpu"), name="double")
    assert engine.info.dtype == "float32"
    assert_same(scratch(engine, tokens), dists(plain.float()))
