"""The sampler law: the batched pass gives the reference's token on every row, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.sampling import dist as core_noise
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import NOT_SAMPLED, RowSampling, RowTree, SampledRow, SamplingParams, sample_row
from paceline.engine.base import SampleRequest
from paceline.engine.sampling import open_sampler, row_kernel
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.sampling.row_kernel import HostLogits, is_plain, sample_host_rows
from paceline.engine.sampling.workspace import group_maxima
from paceline.engine.tensors import dists
from tests.depth import DEPTH

ROWS = 4_000 * DEPTH  # of the law, over all kinds of logits and options


Drawn = tuple[torch.Tensor, list[RowSampling], list[SampledRow]]


def references(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[SampledRow]:
    return [sample_row(dist, row) for dist, row in zip(dists(logits), rows, strict=True)]


def peaked(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A few likely ids far above the rest, as of a language model."""
    logits = rng.normal(size=shape) * 2.0
    for row in logits:
        row[rng.integers(0, shape[1], size=12)] += rng.exponential(4.0, size=12) + 6.0
    return logits


def flat(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.normal(size=shape) * 0.5


def tied(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Many equal logits, at the top too."""
    return np.round(rng.normal(size=shape) * 2.0)


def masked(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    logits = peaked(rng, shape)
    logits[rng.random(shape) < 0.5] = -np.inf
    logits[:, 3] = 1.0
    return logits


Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
LOGITS: dict[str, Draw] = {"peaked": peaked, "flat": flat, "tied": tied, "masked": masked}


# ---- rows that no model should make, and parameters that no client should ask for ----
def nearly_tied(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return tied(rng, shape) + rng.normal(size=shape) * rng.choice([1e-7, 1e-6, 1e-5], size=(shape[0], 1))


def all_equal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.full(shape, rng.normal() * 10)


def of_one_or_two_ids(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    logits = np.full(shape, -np.inf)
    for row in logits:
        row[rng.integers(0, shape[1], size=int(rng.integers(1, 3)))] = rng.normal() * 20
    return logits


def far_apart(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return -rng.exponential(100, size=shape)


def huge(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.normal(size=shape) * 1e4


def coarse(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """As of a model in bfloat16."""
    return np.asarray(torch.from_numpy(peaked(rng, shape)).bfloat16().double().numpy())


HOSTILE: dict[str, Draw] = {
    each.__name__: each for each in (nearly_tied, all_equal, of_one_or_two_ids, far_apart, huge, coarse)
}


Options = Mapping[str, Sequence[float]]
USUAL: Options = {  # each option off in most rows, so that every pair of them occurs
    "temperature": (0.0, 0.3, 0.8, 1.0, 1.0, 1.6),
    "top_p": (1.0, 1.0, 0.95, 0.5, 0.01),
    "top_k": (0, 0, 1, 20, 64, 200),
    "min_p": (0.0, 0.0, 0.0, 0.05, 0.9),
    "presence_penalty": (0.0, 0.0, 0.0, 0.7),
    "frequency_penalty": (0.0, 0.0, 0.0, 0.4),
    "repetition_penalty": (1.0, 1.0, 1.0, 1.2),
    "bias": (-100.0, -1.0, 2.0, 30.0),
}
EXTREME: Options = {
    "temperature": (0.0, 1e-5, 0.001, 0.01, 0.3, 1.0, 1.0, 2.0),
    "top_p": (1.0, 1.0, 0.9, 0.01, 1e-6, 0.0),
    "top_k": (0, 0, 1, 20, 64, 3000),
    "min_p": (0.0, 0.0, 0.05, 1.0),
    "presence_penalty": (0.0, 0.0, -2.0),
    "frequency_penalty": (0.0, 0.0, 2.0),
    "repetition_penalty": (1.0, 1.0, 1.2, 10.0, 0.1),
    "bias": (-100.0, 2.0, 100.0),
}


def random_row(rng: np.random.Generator, vocab: int, options: Options = USUAL) -> RowSampling:
    counts = {int(token): int(rng.integers(1, 4)) for token in rng.integers(0, vocab, size=rng.integers(0, 30))}
    allowed = None
    if rng.random() < 0.2:
        allowed = rng.random(vocab) < rng.choice((0.5, 0.02))
        allowed[3] = True
    biased = rng.integers(0, vocab, size=rng.integers(1, 4)) if rng.random() < 0.2 else ()
    given = {name: float(rng.choice(values)) for name, values in options.items() if name != "bias"}
    params = SamplingParams(
        **given | {"top_k": int(given["top_k"])},  # type: ignore[arg-type]  # by name
        logit_bias={int(token): float(rng.choice(options["bias"])) for token in biased},
        seed=int(rng.integers(-(2**62), 2**62)),
    )
    prompt = np.unique(rng.integers(0, vocab, size=50)).astype(np.int32) if rng.random() < 0.5 else None
    return RowSampling(params, int(rng.integers(0, 5000)), vocab, counts, prompt, allowed, int(rng.choice((0, 0, 8))))


@cache
def drawn(kind: str, vocab: int, padding: int, count: int) -> Drawn:
    """Logits, rows, and what the reference makes of them wherever they are sampled."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy((LOGITS | HOSTILE)[kind](rng, (count, vocab + padding))).float()
    rows = [random_row(rng, vocab, EXTREME if kind in HOSTILE else USUAL) for _ in range(count)]
    return logits, rows, references(logits, rows)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("vocab", "padding"), [(257, 0), (2048, 0), (5000, 7)])
def test_every_row_has_the_token_of_the_reference(kind: str, vocab: int, padding: int) -> None:
    count = ROWS // (len(LOGITS) * 3)
    logits, rows, reference = drawn(kind, vocab, padding, count)
    sampler = BatchSampler()
    found = sampler.sample(logits.clone(), rows)
    for row, (one, expected) in enumerate(zip(found, reference, strict=True)):
        assert one.token == expected.token, (row, rows[row])
        assert (one.top is None) == (expected.top is None)
        if one.top is not None and expected.top is not None:
            assert one.top.probs.sum() == pytest.approx(expected.top.probs.sum(), rel=1e-5)
            if kind != "tied":  # of equals at a head's edge any may be in it
                assert one.top.ids.tolist() == expected.top.ids.tolist()
    limit = {"peaked": 0.05, "flat": 0.12}.get(kind, 1.0)  # a low top-p of a flat row keeps none of the best candidates
    assert sampler.referred <= limit * count, f"{sampler.referred} of {count} rows were left to the reference"


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kind", HOSTILE)
def test_every_row_that_no_model_should_make_has_the_token_of_the_reference(kind: str) -> None:
    for vocab in (5, 65, 257, 2048):
        logits, rows, reference = drawn(kind, vocab, 0, 80)
        for row, one, other in zip(rows, BatchSampler().sample(logits.clone(), rows), reference, strict=True):
            assert one.token == other.token, (vocab, row)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.95}, {"top_p": 0.8, "top_k": 20}, {"temperature": 0.0}])
def test_a_real_vocabulary(dtype: torch.dtype, options: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(np.concatenate((peaked(rng, (10, 151_936)), flat(rng, (10, 151_936))))).to(dtype)
    params = SamplingParams(seed=5, **options)  # type: ignore[arg-type]
    rows = [RowSampling(params, position, 151_643, num_top=8 * (position % 2)) for position in range(len(logits))]
    sampler = BatchSampler()
    found = sampler.sample(logits, rows)
    assert [row.token for row in found] == [row.token for row in references(logits, rows)]
    assert sampler.referred <= (5 if dtype == torch.bfloat16 else 1)  # equal logits are frequent in bfloat16


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_rows_in_any_order_have_the_tokens_that_they_have_in_place(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(peaked(rng, (40, 2048))).to(dtype)
    rows = [random_row(rng, 2048) for _ in range(40)]
    expected = [row.token for row in BatchSampler().sample(logits, rows)]
    places = rng.permutation(40)[:23].tolist()
    found = BatchSampler().sample(logits, [rows[place] for place in places], places)
    assert [row.token for row in found] == [expected[place] for place in places]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(LOGITS)), st.sampled_from([2, 63, 64, 65, 130]))
def test_small_vocabularies(seed: int, kind: str, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(LOGITS[kind](rng, (8, max(vocab, 4)))).float()
    rows = [random_row(rng, max(vocab, 4)) for _ in range(8)]
    found = BatchSampler().sample(logits, rows)
    assert [row.token for row in found] == [row.token for row in references(logits, rows)]


@pytest.mark.usefixtures("place")
def test_rows_that_are_all_searched_further_keep_their_order() -> None:
    """Few rows at a time, as of few answers: those that need more groups come before those that need fewer."""
    rng = np.random.default_rng(3)
    for position in range(120):
        count, vocab = int(rng.integers(2, 9)), int(rng.choice([1500, 2048]))
        logits = torch.from_numpy(flat(rng, (count, vocab)) * rng.uniform(0.5, 6.0, (count, 1))).float()
        rows = [
            RowSampling(SamplingParams(temperature=float(rng.choice([1.0, 2.0])), seed=seed), position, vocab)
            for seed in range(count)
        ]
        found = BatchSampler().sample(logits, rows)
        assert [row.token for row in found] == [row.token for row in references(logits, rows)]


def test_tokens_follow_the_distribution() -> None:
    """Independent of the reference: frequencies over many seeds."""
    probs = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = torch.full((4000, 300), -torch.inf)
    logits[:, [7, 70, 130, 200, 299]] = torch.from_numpy(np.log(probs)).float()
    rows = [RowSampling(SamplingParams(top_p=0.85, seed=seed), 3, 300) for seed in range(4000)]
    found = [row.token for row in BatchSampler().sample(logits, rows)]
    share = np.array([found.count(token) for token in (7, 70, 130)]) / len(found)
    assert share.sum() == 1.0
    assert share == pytest.approx(probs[:3] / 0.9, abs=0.035)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}])
def test_logits_that_are_not_numbers_are_an_error(options: dict[str, float], dtype: torch.dtype) -> None:
    rows = [RowSampling(SamplingParams(seed=1, **options), position, 2048) for position in range(2)]  # type: ignore[arg-type]
    for nan in (torch.nan, -torch.nan):
        for usual in (torch.from_numpy(peaked(np.random.default_rng(0), (2, 2048))), torch.zeros(2, 2048)):
            for place in (0, 70, 1500, 2047):
                logits = usual.to(dtype)
                logits[1, place] = nan
                with pytest.raises(ValueError, match="no token has a probability above 0"):
                    BatchSampler().sample(logits, rows)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 64, 130, 257]), st.floats(-30.0, 30.0))
def test_group_maxima_in_bfloat16(seed: int, vocab: int, mean: float) -> None:
    """By their bits: of groups that are all below 0 too, of infinities and of both zeros."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(6, vocab)) * 5.0 + mean).bfloat16()
    for special in (torch.inf, -torch.inf, 0.0, -0.0):
        logits[rng.random(logits.shape) < 0.1] = special
    logits[0] = -torch.inf
    wrong = rng.random(6) < 0.3
    logits[torch.from_numpy(wrong), int(rng.integers(0, vocab))] = float(rng.choice([1.0, -1.0])) * torch.nan
    found, expected = group_maxima(logits), group_maxima(logits.float())
    assert found[wrong].isnan().any(1).all()
    assert torch.equal(found[~wrong], expected[~wrong])


def test_the_noise_is_that_of_the_core() -> None:
    seeds, positions = [0, 1234, -1, 2**64 + 5, 77], [0, 56, 7, 2**33, 1]
    keys = core_noise.row_keys(seeds, positions)
    on_device = torch.from_numpy(keys.view(np.int64))
    groups = np.random.default_rng(0).integers(0, 2**18, size=(5, 40))
    found = open_sampler.GroupNoise(on_device, 2**18)
    ids = (groups[:, :, None] * core_noise.GROUP + np.arange(core_noise.GROUP)).reshape(5, -1)
    assert found.gumbel(torch.from_numpy(groups), torch.arange(5)).numpy() == pytest.approx(
        core_noise.gumbel_rows(keys, ids), rel=1e-13
    )
    least = open_sampler.GroupNoise(on_device, 2**12).least.numpy()
    assert least == pytest.approx(core_noise.group_minima(keys, 2**12), rel=1e-13)
    hashes = open_sampler.mixed_by_torch(on_device)  # what a GPU computes
    assert np.array_equal(hashes.numpy().view(np.uint64), core_noise.mixed(keys))
    by_numpy = -np.log(core_noise.uniforms(core_noise.mixed(keys)))
    assert open_sampler.exponentials_by_torch(hashes).numpy() == pytest.approx(by_numpy, rel=1e-13)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("has_kernel", [True, False])
def test_rows_of_arrays_have_the_tokens_of_the_reference(
    kind: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch, built_kernel: ModuleType
) -> None:
    """Alone, and as trees whose tokens lead from row to row; by the kernel nearly always where there is one."""
    monkeypatch.setattr(row_kernel, "kernel", lambda: built_kernel if has_kernel else None)
    rng = np.random.default_rng(6)
    referred = 0

    def counted(dist: Dist, row: RowSampling) -> SampledRow:
        nonlocal referred
        referred += is_plain(row)
        return sample_row(dist, row)

    monkeypatch.setattr(row_kernel, "sample_row", counted)
    for vocab in (5, 257, 2048):
        logits = HostLogits(LOGITS[kind](rng, (60, vocab + 3)).astype(np.float32))
        rows = tuple(random_row(rng, vocab) for _ in range(60))
        expected = SampleRequest(((logits,),), rows).by_reference()
        parts = (HostLogits(tuple(logits.rows[:7])), HostLogits(logits.rows[7:]))
        (found,) = sample_host_rows([SampleRequest((parts,), rows)])
        assert [row.token for row in found] == [row.token for row in expected]
        assert [row.top is None for row in found] == [row.top is None for row in expected]
        parents = (-1, *(int(rng.integers(-1, row)) for row in range(1, 60)))
        tokens = tuple(expected[parent].token if row % 3 else -1 for row, parent in enumerate(parents))
        tree = SampleRequest((parts,), rows, tree=RowTree(parents, tokens))
        (found,) = sample_host_rows([tree])
        assert [row.token for row in found] == [row.token for row in tree.by_reference()]
        assert 1 < sum(row.token != NOT_SAMPLED.token for row in found) < 60
    assert not has_kernel or kind == "tied" or referred < 40, "the kernel decides most rows"
