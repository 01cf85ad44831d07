"""How near two values must be for rounding to decide between them; such rows are left to the reference."""

from __future__ import annotations

MARGIN = 1e-4  # nats between scores: far more than float32's rounding of logits, temperature and softmax
MASS_MARGIN = 1e-4  # of a row's probability, for sums over a vocabulary in float32
DISTINCT = 1e-5  # nats: logits that differ by more have different probabilities in float32
UNDERFLOW = 80.0  # nats below the best: probabilities in float32 may be 0 there
