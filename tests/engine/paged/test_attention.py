"""Every way to attend gives what softmax defines, on random ragged batches.

Triton's kernels run on the GPU of `TEST_DEVICE`; without one, in Triton's interpreter, where it is installed.
"""

from __future__ import annotations

import random

import pytest
import torch

from lab.torch_kernels import TorchKernels
from paceline.engine.paged.attention.backends import Attention, ModelAttention, Tiled, make_attention
from paceline.engine.paged.attention.tile_plan import StepShape
from tests.engine.conftest import DEVICE
from tests.engine.paged.attention_cases import Case, Kind, case

MIXED: list[Kind] = ["decode", "prompt", "tree", "decode", "part", "chain", "prompt", "part", "decode"]
SHAPES = {
    "grouped": {"heads": 4, "kv_heads": 2},
    "qwen2.5-7b's heads": {"heads": 14, "kv_heads": 2, "dim": 128},
    "one head of K and V": {"heads": 24, "kv_heads": 1, "dim": 64},
    "every head its own": {"heads": 3, "kv_heads": 3, "dim": 64},
    "small window": {"heads": 4, "kv_heads": 2, "window": 7},
    "window beyond an item": {"heads": 4, "kv_heads": 2, "window": 90},
    "softcap and window": {"heads": 4, "kv_heads": 2, "softcap": 5.0, "window": 40},
    "odd dimensions": {"heads": 4, "kv_heads": 2, "dim": 24, "value_dim": 40},
}


@pytest.fixture(params=["gathered", "twin", "triton"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def attend(name: str, given: Case, *, padded_to: int | None = None) -> torch.Tensor:
    model = ModelAttention([given.params], given.query.shape[1])
    if name == "triton":
        pytest.importorskip("triton", reason="triton is not installed: its kernels run neither here nor interpreted")
    chosen: Attention = TorchKernels() if name == "twin" else "triton" if name == "triton" else "gathered"
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
    for seed in range(60):
        kinds: list[Kind] = draw.choices(["decode", "chain"], (3, 2), k=draw.randrange(2, 17))
        given = case(kinds, seed, longest=draw.choice((30, 100)), device=DEVICE)
        torch.testing.assert_close(attend(name, given), given.expected(), atol=2e-5, rtol=2e-4)
