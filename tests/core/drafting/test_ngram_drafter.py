"""The n-gram drafter on a Markov target: its trees, their expected acceptance, and ranking with the common noise."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lab.baselines.lookup import AS_PUBLISHED, DrafterOptions, VariedDrafter
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable, bigram_key
from paceline.core.drafting.ngram_drafter import NO_DRAFT, DrafterStats, DraftTree, NgramDrafter
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, sample
from tests.core.dists import from_logits
from tests.core.drafting.draft_paths import roots, text, walk
from tests.core.tables import check

VOCAB = 24
TABLE_PROBS = replace(AS_PUBLISHED, noise=False)


def markov(seed: int, sharpness: float = 2.0) -> list[Dist]:
    """A distribution after each token."""
    rows = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * sharpness
    return [from_logits(row) for row in rows]


def filled_table(dists: list[Dist]) -> LookupTable:
    table = LookupTable(VOCAB)
    for token, dist in enumerate(dists):
        ids, probs = zip(*dist.top(NUM_SUCCESSORS), strict=True)
        table.record(token, ids, probs)
    return table


def target(dists: list[Dist], params: SamplingParams, drafted: DraftTree, last: int, start: int, node: int) -> int:
    token = last if node < 0 else drafted.tokens[node]
    return sample(dists[token], params, start + len(text(drafted, node)))


def decode(
    dists: list[Dist],
    drafter: NgramDrafter,
    params: SamplingParams,
    steps: int,
    *,
    budget: int = 12,
    learn: bool = True,
) -> tuple[list[int], list[tuple[DraftTree, int]]]:
    """The output, and each step's tree and number of output tokens."""
    output, past = [0], []
    drafter.observe(0)
    for _ in range(steps):
        drafted = drafter.draft(budget, len(output))
        start = len(output)

        walked = walk(drafted, partial(target, dists, params, drafted, output[-1], start))
        for token in walked:
            drafter.observe(token)
        if learn:
            for token in drafted.tokens:
                drafter.learn(token, dists[token], accepted=False)
            drafter.learn(output[-1], dists[output[-1]], before=output[-2] if len(output) > 1 else None)
        past.append((drafted, len(walked)))
        output += walked
    return output, past


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_mean_tokens_per_step_are_one_more_than_the_expected_accepted(seed: int, budget: int) -> None:
    """On a Markov target whose rows are in the table, at temperature 1 with noise that the drafter ignores."""
    dists, steps = markov(seed), 500
    drafter = VariedDrafter(filled_table(dists), SamplingParams(seed=seed), options=TABLE_PROBS)
    _, past = decode(dists, drafter, SamplingParams(seed=seed), steps, budget=budget, learn=False)
    gained = np.array([count - 1.0 - sum(drafted.probs) for drafted, count in past])
    assert abs(gained.mean()) < 4.0 * gained.std() / math.sqrt(steps)


def test_rows_become_the_target_s_heads_and_the_output_is_the_target_s() -> None:
    dists, params = markov(1), SamplingParams(seed=5)
    table = LookupTable(VOCAB)
    output, _ = decode(dists, NgramDrafter(table, params), params, 100)
    plain = [0]
    while len(plain) < len(output):
        plain.append(sample(dists[plain[-1]], params, len(plain)))
    assert output == plain
    for token in set(output[:-20]):
        ids, probs = table.successors(token)
        assert ids == [i for i, _ in dists[token].top(NUM_SUCCESSORS)]
        assert probs == pytest.approx([p for _, p in dists[token].top(NUM_SUCCESSORS)], rel=1e-6)


def mean_tokens(options: DrafterOptions, temperature: float, seeds: int = 3, budget: int = 6, steps: int = 80) -> float:
    counts: list[int] = []
    for seed in range(seeds):
        dists, params, stats = markov(seed, 1.5), SamplingParams(temperature=temperature, seed=seed), DrafterStats()
        _, past = decode(
            dists,
            VariedDrafter(filled_table(dists), params, stats=stats, options=options),
            params,
            steps,
            budget=budget,
        )
        counts += [count for _, count in past]
    return float(np.mean(counts))


def test_ranking_by_the_common_noise_predicts_what_the_target_samples() -> None:
    without = mean_tokens(replace(TABLE_PROBS, probs="learnt"), 1.0)
    ranked = mean_tokens(replace(TABLE_PROBS, probs="learnt", noise=True), 1.0)
    assert ranked > 2.0 * without


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_learnt_acceptance_rates_predict_the_accepted_tokens(temperature: float) -> None:
    dists, params = markov(2), SamplingParams(temperature=temperature, seed=3)
    _, past = decode(dists, NgramDrafter(filled_table(dists), params), params, 300)
    late = past[100:]
    expected, gained = np.mean([sum(d.probs) for d, _ in late]), np.mean([count - 1.0 for _, count in late])
    assert expected == pytest.approx(gained, rel=0.15)


@pytest.mark.parametrize("bigrams", [False, True])
def test_bigrams_predict_more_than_tokens_if_the_target_depends_on_two(bigrams: bool) -> None:
    """The successor of 2 depends on the token before it; its previous successor does not help."""
    options, said = DrafterOptions(automaton=False, bigrams=bigrams), [0, 1, 2, 9, 0, 3, 2, 8, 0, 5, 2, 7] * 6
    drafter, right = VariedDrafter(LookupTable(VOCAB), SamplingParams(temperature=0.0), options=options), []
    for place, token in enumerate(said):
        drafter.observe(token)
        if token == 2:
            right.append(drafter.draft(1, place).tokens == (said[place + 1],))
        if place > 1:
            drafter.learn(said[place - 1], Dist.dense(np.eye(VOCAB)[token]), before=said[place - 2])
    assert all(right[3:]) if bigrams else sum(right) < len(right) / 2


def test_a_dist_is_learnt_for_its_own_bigram_only() -> None:
    table = LookupTable(VOCAB)
    assert table.bigrams is not None
    drafter = NgramDrafter(table, SamplingParams(temperature=0.0))
    for token in (0, 2, 1, 2, 5):
        drafter.observe(token)
    drafter.learn(2, Dist.dense(np.eye(VOCAB)[5]), before=1)
    drafter.learn(5, Dist.dense(np.eye(VOCAB)[7]))
    assert table.bigrams.successors(bigram_key(1, 2)) == ([5], [1.0])
    assert table.bigrams.successors(bigram_key(0, 2)) == ([], [])
    assert len(table.bigrams) == 1 and table.successors(5) == ([7], [1.0])


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
def test_a_token_next_to_impossible_does_not_stop_a_tree(temperature: float) -> None:
    """One request drafts from the rows that another has learnt, at any temperature."""
    table = LookupTable(VOCAB)
    dist = np.full(VOCAB, 1e-60)
    dist[2] = 1.0
    drafter = NgramDrafter(table, SamplingParams(temperature=temperature))
    drafter.learn(1, Dist.dense(dist))
    drafter.observe(1)
    assert drafter.draft(4, 0).tokens == (2,)
    check(table)


def test_as_in_the_paper_accepted_dists_overwrite_a_row_and_others_are_added() -> None:
    table = LookupTable(VOCAB)
    drafter = VariedDrafter(table, SamplingParams(), options=TABLE_PROBS)
    drafter.learn(1, Dist.dense(np.eye(VOCAB)[2]))
    drafter.learn(1, Dist.dense(np.eye(VOCAB)[3] * 0.5), accepted=False)
    assert table.successors(1) == ([2, 3], [1.0, 0.5])
    drafter.learn(1, Dist.dense(np.eye(VOCAB)[4]))
    assert table.successors(1) == ([4], [1.0])
    assert table.bigrams is not None and len(table.bigrams) == 0


def test_the_automaton_copies_what_the_text_repeats() -> None:
    repeated = [5, 1, 9, 3, 7, 2, 8, 4, 6, 0, 5, 1, 9]
    drafter = VariedDrafter(LookupTable(VOCAB), SamplingParams(temperature=0.0), options=DrafterOptions(tables=False))
    for token in repeated:
        drafter.observe(token)
    drafted = drafter.draft(6, 0)
    assert text(drafted, len(drafted) - 1) == (3, 7, 2, 8, 4, 6)
    assert list(drafted.probs) == sorted(drafted.probs, reverse=True)


def test_documents_are_drafted_from_up_to_their_end() -> None:
    drafter = NgramDrafter(LookupTable(VOCAB), SamplingParams(temperature=0.0))
    drafter.read([1, 2, 3])
    drafter.read([7, 8])
    for token in (9, 1, 2):
        drafter.observe(token)
    assert drafter.draft(5, 0).tokens == (3,)


def test_tables_and_automaton_share_one_tree_in_which_siblings_differ() -> None:
    table = LookupTable(VOCAB)
    table.record(2, [3, 6, 5], [0.6, 0.2, 0.1])
    drafter = NgramDrafter(table, SamplingParams(temperature=0.0))
    for token in (1, 2, 5, 4, 1, 2):
        drafter.observe(token)
    drafted = drafter.draft(20, 0)
    assert {drafted.tokens[node] for node in roots(drafted)} == {3, 5, 6}
    assert sum(drafted.probs[node] for node in roots(drafted)) <= 1.0


def test_nothing_is_drafted_after_eos_and_before_the_first_token() -> None:
    table = LookupTable(VOCAB)
    table.record(1, [2], [0.9])
    table.record(2, [3], [0.9])
    drafter = NgramDrafter(table, SamplingParams(temperature=0.0), eos_ids=frozenset({2}))
    assert drafter.draft(4, 0) == NO_DRAFT
    drafter.observe(1)
    assert drafter.draft(0, 0) == NO_DRAFT
    assert drafter.draft(4, 0).tokens == (2,)
