"""*Agreement*: the target's own token by the common noise; a draft is accepted where it is that token.

Any draft will do. Drafted with the same noise from a distribution that is nearly the target's, most are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.aggregation.own_dist import OwnDist
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.draft_verify.verifiers.base import Draft, Outcome, Row
from paceline.wire.payloads.varints import decode_tokens, encode_tokens
from paceline.wire.verify_messages import DraftChain


class Agreement:
    reads_dists = needs_drafts = drafts_ends = False

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def draft(self, own: OwnDist, position: int) -> Draft:
        return Draft(own.token(self._sampling, position))

    def message(
        self,
        epoch: int,
        base: int,
        offset: int,
        drafts: Sequence[Draft],
        *,
        last: bool,  # noqa: ARG002  # an empty message says so
        recovered: int | None,  # noqa: ARG002  # nothing is left to the drafter
    ) -> DraftChain:
        return DraftChain(0, epoch, base, offset, encode_tokens([draft.token for draft in drafts]))

    def recover(self, own: OwnDist | None, head: Dist, position: int) -> int:  # noqa: ARG002  # nothing is left to it
        """Of a cloud that breaks the rules."""
        return head.argmax()

    def received(self, message: DraftChain) -> list[Draft]:
        return [Draft(token) for token in decode_tokens(message.tokens)]

    def decide(self, row: Row, draft: Draft | None) -> Outcome | None:  # noqa: ARG002  # it is compared, not used
        return row.own()
