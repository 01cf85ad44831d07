"""The text equals its reference in any network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import SIDES, Side, Strategy
from tests.depth import DEPTH
from tests.strategies.cases import SAMPLINGS, Manner
from tests.strategies.conformance.laws import (
    check_alone,
    check_lane_alone,
    check_plain_dists,
    check_repeats,
    check_text,
    check_without_documents,
    every_manner,
    seeds_of,
)


@every_manner(samplings=SAMPLINGS, networks=True)
def test_text_equals_the_reference(
    strategy: Strategy, manner: Manner, front: Side, reorders: bool, sampling: SamplingParams
) -> None:
    seeds = seeds_of(manner, front, sampling, reorders)
    check_text(strategy, manner, front, sampling, seeds, reorders=reorders)


@every_manner(fronts=True)
def test_without_a_peer_the_front_answers_alone(strategy: Strategy, manner: Manner, front: Side) -> None:
    check_alone(strategy, manner, front)


@every_manner(one_writer=True, fronts=True)
@pytest.mark.parametrize("linked", [True, False])
def test_logprobs_are_the_writing_models_own_before_any_processing(
    strategy: Strategy, manner: Manner, front: Side, linked: bool
) -> None:
    manner = replace(manner, needs_dists=True, options=(*manner.options, ("needs_dists", True)))
    sampling = SamplingParams(
        temperature=0.2, top_p=0.9, top_k=5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={65: 3.0}, seed=4
    )
    check_plain_dists(strategy, manner, front, sampling, linked=linked)


@every_manner(fronts=True)
def test_a_front_alone_names_itself_where_it_reads_a_document(strategy: Strategy, manner: Manner, front: Side) -> None:
    check_lane_alone(strategy, manner, front)


@every_manner(part=(1, 2), networks=True)
@pytest.mark.parametrize("empty", SIDES)
def test_a_side_without_documents_has_no_say(
    strategy: Strategy, manner: Manner, front: Side, empty: Side, reorders: bool
) -> None:
    """In a mixture the other side decides; the front's own text where no peer takes part."""
    check_without_documents(strategy, manner, front, empty, range(DEPTH), reorders=reorders)


@every_manner(part=(0, 4), networks=True)
def test_a_run_repeats_exactly(strategy: Strategy, manner: Manner, front: Side, reorders: bool) -> None:
    check_repeats(strategy, manner, front, reorders=reorders)
