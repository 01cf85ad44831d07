"""The verifier of an answer."""

from __future__ import annotations

from paceline.strategies.base import MachineConfig
from paceline.strategies.draft_verify.options import options_of
from paceline.strategies.draft_verify.verifiers.agreement import Agreement
from paceline.strategies.draft_verify.verifiers.base import Verifier
from paceline.strategies.draft_verify.verifiers.rejection import Rejection
from paceline.strategies.draft_verify.verifiers.truncated import Truncated


def verifier_of(config: MachineConfig) -> Verifier:
    """By its options, the same on both sides."""
    options, sampling = options_of(config), config.sampling
    match options.verifier:
        case "rejection":
            return Rejection(sampling, precise=options.needs_dists)
        case "truncated":
            return Truncated(sampling, mass=options.mass, vocab_size=config.vocab_size)
        case _:
            return Agreement(sampling)
