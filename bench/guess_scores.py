"""The classifier of `bench leakage`: how well features tell guesses that are true from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FOLDS: Final = 5
Features = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of guesses by logistic regression, each by a model fitted to the other folds."""

    members: Features
    others: Features

    @staticmethod
    def of(members: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Scored:
        features: Features = np.array([*members, *others], dtype=np.float64)
        labels = np.array([1.0] * len(members) + [0.0] * len(others))
        fold = np.concatenate([np.arange(len(members)), np.arange(len(others))]) % FOLDS
        scores = np.zeros(len(labels))
        for held in range(FOLDS):
            fitted, scored = fold != held, fold == held
            scores[scored] = _scores(features[fitted], labels[fitted], features[scored])
        return Scored(scores[: len(members)], scores[len(members) :])

    def area(self, among: Sequence[int] | None = None) -> float:
        """Mean AUC of the folds. among: of the members and the others at these places; None: of all."""
        areas = []
        for held in range(FOLDS):
            inside, outside = (
                each[[i for i in (range(len(each)) if among is None else among) if i % FOLDS == held]]
                for each in (self.members, self.others)
            )
            if len(inside) and len(outside):
                wins = (inside[:, None] > outside[None, :]).mean() + (inside[:, None] == outside[None, :]).mean() / 2
                areas.append(float(wins))
        return sum(areas) / len(areas)


def _scores(features: Features, labels: Features, asked: Features) -> Features:
    """Scores of logistic regression with a ridge of 1, by Newton's method."""
    mean, scale = np.nanmean(features, axis=0), np.nanstd(features, axis=0)
    scale[scale < 1e-9] = 1.0
    # Where there is no text its features are those of the average text: that it is missing counts as a channel.
    centred = (np.nan_to_num((x - mean) / scale) for x in (features, asked))
    design, other = (np.column_stack([np.ones(len(x)), x]) for x in centred)
    ridge = np.eye(design.shape[1])
    weights = np.zeros(design.shape[1])
    for _ in range(25):
        chances = 1.0 / (1.0 + np.exp(-np.clip(design @ weights, -30, 30)))
        curve = design.T @ (design * (chances * (1 - chances))[:, None]) + ridge
        weights += np.linalg.solve(curve, design.T @ (labels - chances) - ridge @ weights)
    result: Features = np.round(other @ weights, 9)
    return result
