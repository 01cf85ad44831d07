"""Speeds of drafting methods relative to each other, with intervals over resampled prompts.

A group is what several ways wrote to the same prompts: of one model and one task, or of one setting. Over groups the
geometric mean is taken, so that no group counts more for being fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from ..bootstrap import Estimate, estimate
from .drafters import OURS, PLAIN
from .single_session import Answer

Group = Mapping[str, Sequence[Answer]]  # by way, in the order of the prompts


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second."""
    return sum(answer.timed for answer in answers) / max(1e-9, sum(answer.seconds for answer in answers))


def relative(groups: Sequence[Group], way: str, to: str = PLAIN) -> Estimate:
    """Tokens per second of `way` ÷ those of `to`."""
    return estimate(_size(groups), lambda among: _relative(groups, way, to, among))


def worst_rank(tasks: Collection[Sequence[Group]], besides: Collection[str]) -> Estimate:
    """The worst place of ours in any task, 1 for the fastest. tasks: of each, its groups. besides: ways that are no
    competitors. One that only some models have is compared on those."""

    def faster(groups: Sequence[Group], way: str, among: Sequence[int]) -> bool:
        return _relative([group for group in groups if way in group], way, OURS, among) > 1.0

    def place(among: Sequence[int]) -> float:
        ranks: list[int] = []
        for groups in tasks:
            ways = {way for group in groups for way in group} - {OURS, *besides}
            ranks.append(1 + sum(faster(groups, way, among) for way in ways))
        return float(max(ranks))

    return estimate(max(map(_size, tasks)), place)


def per_step(answers: Sequence[Answer]) -> float:
    """Tokens for each forward after the prompt's."""
    return sum(answer.timed for answer in answers) / max(1.0, sum(forwards(answer) - 1 for answer in answers))


def forwards(answer: Answer) -> float:
    return answer.stats.get("forwards", len(answer.tokens))


def steps_relative(group: Group, way: str, to: str) -> Estimate:
    """Tokens per step of `way` ÷ those of `to`."""

    def ratio(among: Sequence[int]) -> float:
        return per_step(_of(group[way], among)) / per_step(_of(group[to], among))

    return estimate(_size([group]), ratio)


def _relative(groups: Sequence[Group], way: str, to: str, among: Sequence[int]) -> float:
    return statistics.geometric_mean(rate(_of(group[way], among)) / rate(_of(group[to], among)) for group in groups)


def _of(answers: Sequence[Answer], among: Sequence[int]) -> list[Answer]:
    """The answers at these places; a group with fewer prompts than others begins again."""
    return [answers[place % len(answers)] for place in among]


def _size(groups: Sequence[Group]) -> int:
    return max(len(answers) for group in groups for answers in group.values())
