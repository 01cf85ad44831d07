"""The contract's properties for a model behind servers: tokens are the reference's, whatever is asked of a sequence.

Not kept: exported and imported rows (property 9), stages (6). Distributions are whole only where a server tells all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.core.aggregation.weights import BranchMixture, sample_mixed_rows
from paceline.core.batching.segment import Segment
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import NOT_SAMPLED, RowSampling, SampledRow, SamplingParams, sample_row
from paceline.engine.remote.opening import open_remote
from paceline.errors import EngineError
from paceline.runtime.engine_loop.remote_worker import RemoteWorker
from paceline.runtime.engine_loop.requests import BranchJoin, Certainty, ForwardRequest, Rows, SequenceOp
from tests.runtime.remote.standin import StandIn, installed

pytestmark = pytest.mark.anyio
VOCAB = 257
PROMPT = tuple(b"user: Where is the key?\nassistant: ")
GREEDY = SamplingParams(temperature=0.0)


@asynccontextmanager
async def workers(stand_in: StandIn, *hosts: str) -> AsyncIterator[RemoteWorker]:
    with installed(stand_in, *(hosts or ("one",))) as urls:
        worker = RemoteWorker(open_remote(urls, Path(), stand_in.text, name="fake"))
        await worker.start()
        try:
            async with asyncio.timeout(30):
                yield worker
        finally:
            await worker.stop()


async def ask(worker: RemoteWorker, segment: Segment, sampling: Sequence[RowSampling] | None, **fields: object) -> Rows:
    answered: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()

    def answer(result: Rows | EngineError) -> None:
        if isinstance(result, EngineError):
            answered.set_exception(result)
        else:
            answered.set_result(result)

    request = ForwardRequest(segment, answer, sampling=None if sampling is None else tuple(sampling))
    for name, value in fields.items():
        setattr(request, name, value)
    worker.submit(request)
    return await answered


def row(params: SamplingParams, position: int = 0, **fields: object) -> RowSampling:
    return RowSampling(params, position, VOCAB, **fields)  # type: ignore[arg-type]  # by name


def tokens(rows: Rows) -> list[int]:
    return [each.token for each in rows if isinstance(each, SampledRow)]


OPTIONS = {
    "greedy": GREEDY,
    "plain": SamplingParams(seed=3),
    "hot": SamplingParams(seed=3, temperature=2.5),
    "cold": SamplingParams(seed=9, temperature=0.3),
    "top_k": SamplingParams(seed=4, top_k=5),
    "top_p": SamplingParams(seed=4, top_p=0.3, temperature=0.4),
    "min_p": SamplingParams(seed=6, min_p=0.3),
    "penalised": SamplingParams(seed=5, frequency_penalty=0.5, presence_penalty=-0.4),
    "biased": SamplingParams(seed=6, logit_bias={7: 4.0, 101: 2.0, 32: -3.0}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("constrained", [False, True])
async def test_property_10_rows_have_the_tokens_of_the_reference(name: str, constrained: bool) -> None:
    stand_in, params = StandIn(), OPTIONS[name]
    allowed = np.arange(VOCAB) % 3 == 0 if constrained else None
    async with workers(stand_in) as worker:
        certainty, found, expected = Certainty(), list[int](), list[int]()
        for position in range(24):
            prompt = (*PROMPT, position + 65)
            sampling = row(params, position, counts={32: 1, 101: 2}, allowed=allowed, num_top=2)
            rows = await ask(worker, Segment(worker.allocate(), 0, prompt), [sampling], certainty=certainty)
            found += tokens(rows)
            expected.append(sample_row(stand_in.dist(prompt), sampling).token)
        draws = [body for _, body in stand_in.servers["one"].calls if body.get("temperature")]  # the server's own
        differing = sum(one != other for one, other in zip(found, expected, strict=True))
        assert differing <= len(draws) and not certainty.approximate
        if not constrained and name not in ("top_p", "min_p"):
            assert not draws


async def test_ids_that_the_noise_lifts_are_asked_for_by_a_call_that_is_counted() -> None:
    stand_in, certainty = StandIn(head=5), Certainty()
    async with workers(stand_in) as worker:
        for position in range(40):
            sampling = row(SamplingParams(seed=8, temperature=1.5), position)
            rows = await ask(worker, Segment(worker.allocate(), 0, PROMPT), [sampling], certainty=certainty)
            assert tokens(rows) == [sample_row(stand_in.dist(PROMPT), sampling).token]
    lists = [body for _, body in stand_in.servers["one"].calls if "logprob_token_ids" in body][1:]
    assert len(lists) == certainty.further_calls > 0


async def test_calls_that_name_ids_spoil_no_others() -> None:
    """Many at once, at a server that mixes them up, and where another program's calls are mixed with these."""
    stand_in, certainty = StandIn(head=5, mixes=True), Certainty()
    samplings = [row(SamplingParams(seed=8, temperature=1.5), position) for position in range(60)]
    async with workers(stand_in) as worker:
        found = await asyncio.gather(
            *(ask(worker, Segment(worker.allocate(), 0, PROMPT), [one], certainty=certainty) for one in samplings)
        )
        number, stand_in._naming = len(stand_in.servers["one"].calls), 1
        others = ask(worker, Segment(worker.allocate(), 0, PROMPT), [samplings[0]], certainty=certainty)
        asked = asyncio.create_task(others)
        while len(stand_in.servers["one"].calls) < number + 2:
            await asyncio.sleep(0.001)
        stand_in._naming = 0
        found.append(await asked)
    dist = stand_in.dist(PROMPT)
    assert [tokens(rows) for rows in found] == [[sample_row(dist, one).token] for one in [*samplings, samplings[0]]]
    assert certainty.further_calls and not certainty.approximate


async def test_without_named_ids_a_sampled_token_is_approximate_and_a_greedy_one_is_not() -> None:
    async with workers(StandIn(head=5, ignores=frozenset({"logprob_token_ids"}))) as worker:
        sampled, greedy = Certainty(), Certainty()
        for position in range(40):
            hot = row(SamplingParams(seed=8, temperature=1.5), position)
            await ask(worker, Segment(worker.allocate(), 0, PROMPT), [hot], certainty=sampled)
            await ask(worker, Segment(worker.allocate(), 0, PROMPT), [row(GREEDY)], certainty=greedy)
        assert sampled.approximate and not greedy.approximate


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=2)])
async def test_properties_1_to_4_7_and_8_rows_are_those_of_their_paths(params: SamplingParams) -> None:
    """A chain in two parts, a tree on it that grows, a prune that leaves some open, a truncate, a chain again."""
    stand_in = StandIn()

    def expected(path: tuple[int, ...], position: int) -> int:
        return sample_row(stand_in.dist((*PROMPT, *path)), row(params, position)).token

    async with workers(stand_in) as worker:
        seq, start = worker.allocate(), len(PROMPT)
        await ask(worker, Segment(seq, 0, PROMPT[:9]), [row(params)])
        first = await ask(worker, Segment(seq, 9, PROMPT[9:]), [row(params)])
        assert tokens(first) == [expected((), 0)]
        tree = Segment(seq, start, (65, 66, 67, 68), (-1, 0, 0, 2), "all")
        assert tokens(await ask(worker, tree, [row(params, n) for n in (1, 2, 2, 3)])) == [
            *(expected(path, n) for path, n in (((65,), 1), ((65, 66), 2), ((65, 67), 2), ((65, 67, 68), 3)))
        ]
        grown = Segment(seq, start + 4, (69, 70), (1, 3), "all", (4, 5))
        assert tokens(await ask(worker, grown, [row(params, n) for n in (3, 4)])) == [
            *(expected(path, n) for path, n in (((65, 66, 69), 3), ((65, 67, 68, 70), 4)))
        ]
        worker.submit(SequenceOp.prune(seq, (0, 2), (3, 5)))
        last = Segment(seq, start + 4, (71,), (5,), "all", (6,))
        assert tokens(await ask(worker, last, [row(params, 5)])) == [expected((65, 67, 68, 70, 71), 5)]
        worker.submit(SequenceOp.truncate(seq, start + 1))
        chain = Segment(seq, start + 1, (72, 73), logits="all")
        assert tokens(await ask(worker, chain, [row(params, n) for n in (2, 3)])) == [
            expected((65, 72), 2),
            expected((65, 72, 73), 3),
        ]
        with pytest.raises(EngineError, match="the segment starts at"):
            await ask(worker, Segment(seq, 3, (1,)), [row(params)])
        worker.submit(SequenceOp.release(seq))
        assert tokens(await ask(worker, Segment(seq, 0, PROMPT), [row(params)])) == [expected((), 0)]


async def test_of_a_tree_whose_path_is_wanted_alone_no_other_row_is_sampled() -> None:
    stand_in = StandIn()
    async with workers(stand_in) as worker:
        (best,) = tokens(await ask(worker, Segment(seq := worker.allocate(), 0, PROMPT), [row(GREEDY)]))
        then = sample_row(stand_in.dist((*PROMPT, best)), row(GREEDY, 1)).token
        tree = Segment(seq, len(PROMPT), (best, 7, then), (-1, 0, 0), "all")
        found = await ask(worker, tree, [row(GREEDY, n) for n in (1, 2, 2)], path_only=True)
        assert [each is NOT_SAMPLED for each in found] == [False, True, False]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=2)])
@pytest.mark.parametrize("heads", [False, True])
async def test_a_mixture_of_branches_is_the_reference_s(params: SamplingParams, heads: bool) -> None:
    stand_in, prompts = StandIn(), (PROMPT, (*b"document: the key is here\n", *PROMPT))
    certainty = Certainty()
    async with workers(stand_in) as worker:
        for position in range(12):
            mixture = BranchMixture((0.3, 1.1), ((0.0, -0.4),), True, (-1,), (0,), (None, None), heads)
            rows = (row(params, position, num_top=3),)
            answered: asyncio.Future[Rows | EngineError] = asyncio.get_running_loop().create_future()
            ends = [(*prompt, position + 65) for prompt in prompts]
            join = BranchJoin(rows, mixture, answered.set_result, 2)
            for branch, prompt in enumerate(ends):
                request = ForwardRequest(Segment(worker.allocate(), 0, prompt), join.fail, join=join, branch=branch)
                request.certainty = certainty
                worker.submit(request)
            found = await answered
            assert not isinstance(found, EngineError)
            (expected,) = sample_mixed_rows([[stand_in.dist(prompt)] for prompt in ends], rows, mixture)
            (one,) = found
            assert isinstance(one, SampledRow) and one.token == expected.token
            assert one.branch_probs == pytest.approx(expected.branch_probs, abs=1e-6)
            if heads:
                _assert_bounds(one, expected.head.dist if expected.head else None, stand_in, ends, params, position)
        assert not certainty.approximate


def _assert_bounds(
    found: SampledRow,
    known: Dist | None,
    stand_in: StandIn,
    ends: Sequence[tuple[int, ...]],
    params: SamplingParams,
    at: int,
) -> None:
    """A head's probabilities are those of the mixture, and no other id is beyond its bounds."""
    assert found.head is not None and known is not None
    mixture = BranchMixture((0.3, 1.1), ((0.0, -0.4),), True, (-1,), (0,), (None, None), True)
    (whole,) = sample_mixed_rows(
        [[stand_in.dist(prompt)] for prompt in ends], (row(params, at, num_top=VOCAB),), mixture
    )
    assert whole.top is not None
    for token, prob in zip(found.head.dist.ids, found.head.dist.probs, strict=True):
        assert prob == pytest.approx(whole.top.prob(int(token)), rel=1e-6)
    others = [prob for token, prob in whole.top.top(VOCAB) if found.head.dist.index(token) is None]
    assert max(others, default=0.0) <= found.head.max_prob * (1 + 1e-9)


async def test_distributions_are_whole_where_the_server_tells_all_and_else_approximate() -> None:
    for head, exact in ((VOCAB, True), (20, False)):
        stand_in, certainty = StandIn(head=head), Certainty()
        async with workers(stand_in) as worker:
            (dist,) = await ask(worker, Segment(worker.allocate(), 0, PROMPT), None, certainty=certainty)
        assert isinstance(dist, Dist) and certainty.approximate is not exact
        assert exact is bool(np.abs(dist.probs - stand_in.dist(PROMPT).probs).max() < 1e-9)
