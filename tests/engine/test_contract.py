"""Properties of the engine contract (`paceline.engine.base`), for every engine and architecture."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.batching.segment import Batch, Segment
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import NOT_SAMPLED, RowSampling, RowTree, SamplingParams
from paceline.engine.base import Engine, SampleRequest
from paceline.engine.loader import quiet
from paceline.engine.paged.attention.backends import Attention
from paceline.engine.stage import Stage, StageOutput, load_stage
from paceline.engine.tensors import dists
from tests.engine.checkpoints import ARCHITECTURES
from tests.engine.conftest import HERE, TILED
from tests.engine.trials import Growing, along_paths, assert_same, extend, path, prompts, scratch, sequences, trees

few = settings(max_examples=6, deadline=None, derandomize=True)


@pytest.mark.parametrize("backend", ["hf", "paged", "tiled"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_are_those_of_the_plain_forward(
    backend: str, name: str, load: Callable[[str], Engine], checkpoint: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    tokens = [(7 * i * i + 3 * i) % 97 for i in range(40)]
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(checkpoint(name), attn_implementation="eager")
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert_same(scratch(load(f"{backend}-{name}"), tokens), dists(plain))


@few
@given(tokens=prompts(2, 40), cuts=st.sets(st.integers(1, 39), max_size=5))
def test_property_1_splitting_a_chain_changes_nothing(engine: Engine, tokens: list[int], cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    with sequences(engine) as (seq,):
        found = [dist for a, b in itertools.pairwise(edges) for dist in extend(engine, seq, tokens[a:b])]
    assert_same(found, scratch(engine, tokens))


@few
@given(prompt=prompts(0, 30), tree=trees())
def test_property_2_a_tree_row_scores_as_the_chain_along_its_path(
    engine: Engine, prompt: list[int], tree: tuple[list[int], list[int]]
) -> None:
    tokens, parents = tree
    with sequences(engine) as (seq,):
        if prompt:
            extend(engine, seq, prompt)
        found = extend(engine, seq, tokens, parents=parents)
        engine.truncate(seq, len(prompt))
    assert_same(found, along_paths(engine, prompt, tokens, parents, range(len(tokens))))


@few
@given(prompt=prompts(0, 30), tree=trees(), then=prompts(1, 8), data=st.data())
def test_property_3_commit_then_continue_equals_a_fresh_prefill(
    engine: Engine, prompt: list[int], tree: tuple[list[int], list[int]], then: list[int], data: st.DataObject
) -> None:
    tokens, parents = tree
    row = data.draw(st.integers(-1, len(tokens) - 1))
    keep = path(parents, row) if row >= 0 else []
    with sequences(engine) as (seq,):
        if prompt:
            extend(engine, seq, prompt)
        extend(engine, seq, tokens, parents=parents)
        engine.prune(seq, keep)
        engine.check()
        assert engine.length(seq) == len(prompt) + len(keep)
        found = extend(engine, seq, then)
    assert_same(found, scratch(engine, prompt + [tokens[i] for i in keep] + then)[-len(then) :])


@few
@given(prompt=prompts(1, 40), then=prompts(1, 8), data=st.data())
def test_property_4_truncate_then_continue_equals_a_fresh_prefill(
    engine: Engine, prompt: list[int], then: list[int], data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(prompt)))
    with sequences(engine) as (seq,):
        extend(engine, seq, prompt)
        engine.truncate(seq, length)
        engine.check()
        found = extend(engine, seq, then)
    assert_same(found, scratch(engine, prompt[:length] + then)[-len(then) :])


@few
@given(
    starts=st.lists(prompts(0, 40), min_size=2, max_size=7),
    segments=st.lists(trees(6), min_size=7, max_size=7),
    chains=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_property_5_other_sequences_of_the_batch_do_not_matter(
    engine: Engine, starts: list[list[int]], segments: list[tuple[list[int], list[int]]], chains: list[bool]
) -> None:
    alone, batch = [], []
    with sequences(engine, 2 * len(starts)) as seqs:
        for i, start in enumerate(starts):
            tokens, parents = segments[i]
            for seq in seqs[2 * i : 2 * i + 2]:
                if start:
                    extend(engine, seq, start)
            tree = None if chains[i] else parents
            alone.append(extend(engine, seqs[2 * i], tokens, parents=tree))
            shape = None if tree is None else tuple(tree)
            batch.append(Segment(seqs[2 * i + 1], len(start), tuple(tokens), parents=shape, logits="all"))
        together = engine.forward(Batch(tuple(batch))).dists
        engine.check()
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)


def test_property_10_sampled_rows_have_the_tokens_of_the_reference(engine: Engine) -> None:
    """Rows of several segments, of a tree and of a prompt's end in one request, each with other options."""
    options = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(seed=4, top_p=0.9, temperature=0.7),
        SamplingParams(seed=5, top_k=5, frequency_penalty=0.5, repetition_penalty=1.1),
        SamplingParams(seed=6, min_p=0.05, logit_bias={7: 4.0}),
    ]
    vocab = engine.info.vocab_size
    allowed = np.arange(vocab) % 3 == 0
    with sequences(engine, 4) as seqs:
        segments = [
            Segment(seq, 0, tuple(range(1 + i, 12 + i)), logits=3 if i else "all") for i, seq in enumerate(seqs[:3])
        ]
        segments.append(Segment(seqs[3], 0, (4, 5, 6, 7), (-1, 0, 0, 2), "all"))
        output = engine.forward(Batch(tuple(segments)))
        requests = []
        for number, logits in enumerate(output.logits):
            rows = [
                RowSampling(
                    options[(number + row) % len(options)],
                    position=10 * number + row,
                    vocab_size=vocab,
                    counts={3: 1, 8: 2},
                    prompt=np.array([1, 2], dtype=np.int32),
                    allowed=allowed if row % 2 else None,
                    num_top=row % 3,
                )
                for row in range(len(logits))
            ]
            requests.append(SampleRequest(((logits,),), tuple(rows)))
        parts = requests[1].branches[0] + requests[2].branches[0]  # a segment that the scheduler has cut
        both = SampleRequest((parts,), (*requests[1].rows, *requests[2].rows))
        mixture = BranchMixture((0.3, 1.1), ((0.0, -0.4),) * 3, True, (-1, 0, 1), (0, 5, 9), (None, None))
        mixed = SampleRequest(requests[1].branches + requests[2].branches, requests[1].rows, mixture)
        tokens = [row.token for row in requests[3].by_reference()]
        tree = RowTree(
            (-1, 0, 0, 2), (4, (tokens[0] + 1) % vocab, tokens[0], tokens[2])
        )  # from row 0 to row 2 to row 3
        path = SampleRequest(requests[3].branches, requests[3].rows, tree=tree)
        assert [row is NOT_SAMPLED for row in path.by_reference()] == [False, True, False, False]
        for found, token in zip(engine.sample([path])[0], tokens, strict=True):
            assert found is NOT_SAMPLED or found.token == token
        assert engine.sample([path])[0][3].token == tokens[3]
        every = [requests[0], both, mixed, requests[3]]
        for answer, request in zip(engine.sample(every), every, strict=True):
            expected = request.by_reference()
            assert [row.token for row in answer] == [row.token for row in expected]
            for one, other in zip(answer, expected, strict=True):
                assert (one.top is None) == (other.top is None)
                if one.top is not None and other.top is not None:
                    assert one.top.probs.sum() == pytest.approx(other.top.probs.sum(), rel=1e-4)


def test_property_5_sixteen_sequences_decode_together_as_alone(engine: Engine) -> None:
    prompts = [[(5 * i + 3 * j * j) % 97 for j in range(1 + 3 * i)] for i in range(16)]
    with sequences(engine, 16) as seqs:
        for seq, prompt in zip(seqs, prompts, strict=True):
            extend(engine, seq, prompt)
        for step in range(3):
            batch = Batch(tuple(Segment(seq, engine.length(seq), (step + 1,)) for seq in seqs))
            found = engine.forward(batch).dists
    for prompt, dists_of_one in zip(prompts, found, strict=True):
        assert_same(dists_of_one, scratch(engine, [*prompt, 1, 2, 3])[-1:])


@few
@given(prompt=prompts(1, 40), before=prompts(1, 20), then=prompts(1, 8), data=st.data())
def test_property_9_exported_and_imported_rows_then_continued_equal_a_fresh_prefill(
    engine: Engine, prompt: list[int], before: list[int], then: list[int], data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(1, len(prompt)))
    with sequences(engine, 3) as (seq, blocker, into):
        extend(engine, blocker, before)
        extend(engine, seq, prompt)
        rows = engine.export_kv(seq, prompt[:num_rows])
        engine.release(seq)
        extend(engine, blocker, before)  # reuses the blocks of the exported rows
        engine.import_kv(into, rows)
        engine.check()
        assert engine.length(into) == num_rows
        found = extend(engine, into, then)
        engine.truncate(into, num_rows)
        again = extend(engine, into, then)
    assert_same(found, scratch(engine, prompt[:num_rows] + then)[-len(then) :])
    assert_same(again, found)


@few
@given(prompt=prompts(0, 30), tree=trees(12), cuts=st.sets(st.integers(1, 11), max_size=4), aside=prompts(1, 20))
def test_property_7_a_tree_scored_in_parts_equals_the_tree_scored_at_once(
    engine: Engine, prompt: list[int], tree: tuple[list[int], list[int]], cuts: set[int], aside: list[int]
) -> None:
    tokens, parents = tree
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    with sequences(engine, 3) as (whole, parted, other):
        for seq in (whole, parted):
            if prompt:
                extend(engine, seq, prompt)
        extend(engine, other, aside)
        expected = extend(engine, whole, tokens, parents=parents)
        found: list[Dist] = []
        for a, b in itertools.pairwise(edges):  # another sequence writes rows in between
            part = Segment(parted, len(prompt) + a, tuple(tokens[a:b]), tuple(parents[a:b]), "all", tuple(range(a, b)))
            batch = Batch((Segment(other, engine.length(other), (1, 2)), part))
            found += engine.forward(batch).dists[1]
            engine.check()
    assert_same(found, expected)


@few
@given(prompt=prompts(0, 30), data=st.data())
def test_property_8_rows_below_a_part_that_stayed_open_score_as_their_path(
    engine: Engine, prompt: list[int], data: st.DataObject
) -> None:
    with sequences(engine) as (seq,):
        growing = Growing(engine, seq)
        if prompt:
            growing.extend(prompt)
        growing.play(data, 7)


def test_property_8_a_tree_over_many_blocks_is_compacted_in_place(engine: Engine) -> None:
    with sequences(engine) as (seq,):
        growing = Growing(engine, seq)
        growing.extend([3, 1, 4, 1, 5, 9, 2])
        for part in range(3):  # two chains with interleaved rows
            rows = range(20 * part, 20 * part + 20)
            growing.grow([(7 * row + part) % 97 for row in rows], [max(row - 2, -1) for row in rows])
        growing.prune(list(range(1, 20, 2)), list(range(21, 60, 2)))
        growing.grow([8, 9], [19, -1])
        growing.prune([0, 1], list(range(2, 21)))
        growing.grow([8], [18])
        growing.prune(list(range(20)), [])
        growing.extend([5, 6])


def _through(stages: list[Stage], batch: Batch) -> StageOutput:
    result = StageOutput(batch, None, None)
    for stage in stages:
        result = stage.forward(result.batch, result.hidden)
    return result


@pytest.mark.parametrize("attention", [None, TILED])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_property_6_stages_composed_equal_the_whole(
    name: str, attention: Attention | None, load: Callable[[str], Engine], checkpoint: Callable[[str], Path]
) -> None:
    whole = load(f"paged-{name}")
    layers = 3 if name.startswith("gemma") else 2
    options = HERE._replace(kv_rows=512, attention=attention)
    stages = [load_stage(checkpoint(name), i, i + 1, options) for i in range(layers)]
    assert {stage.info.fingerprint for stage in stages} == {whole.info.fingerprint}
    prompt = [(11 * i + 2) % 97 for i in range(20)]
    tree = ((5, 6, 7, 8, 9, 10, 11), (-1, 0, 0, 2, 1, -1, 3))
    with sequences(whole, 2) as (seq, other):
        steps = [
            Batch((Segment(seq, 0, tuple(prompt), logits="all"), Segment(other, 0, (9, 8, 7), logits="none"))),
            Batch((Segment(seq, 20, tree[0][:4], parents=tree[1][:4], logits="all"), Segment(other, 3, (1,)))),
            Batch(
                (
                    Segment(other, 4, (2,)),
                    Segment(seq, 24, tree[0][4:], parents=tree[1][4:], logits="all", ids=(4, 5, 6)),
                )
            ),
        ]
        for batch in steps:
            for found, expected in zip(_outputs(stages, batch), whole.forward(batch).dists, strict=True):
                assert_same(found, expected)
        parts: list[Engine | Stage] = [whole, *stages]
        for part in parts:
            part.prune(seq, (0, 2), live=(3, 6))
            part.truncate(other, 2)
        last = Batch((Segment(other, 2, (3, 4)), Segment(seq, 24, (5, 1), parents=(6, 3), logits="all", ids=(7, 8))))
        for found, expected in zip(_outputs(stages, last), whole.forward(last).dists, strict=True):
            assert_same(found, expected)
        for stage in stages:
            stage.release(seq)
            stage.release(other)
            stage.check()
            assert stage.free_rows() == 512


def _outputs(stages: list[Stage], batch: Batch) -> list[tuple[Dist, ...]]:
    output = _through(stages, batch).output
    assert output is not None
    return list(output.dists)
