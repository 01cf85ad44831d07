"""Drafts as an attacker would send them: token ids, trees and chains of them, and their distributions.

They are written as the codecs write them, and at times are none. Everything random comes from `rng`.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from typing import Any

from paceline.core.verification import POINTS
from paceline.errors import RemoteProtocolError
from paceline.wire.messages import Frame, Targets
from paceline.wire.payloads import (
    FOLLOWS,
    PROB_BYTES,
    YOURS,
    EncodedNodes,
    encode_places,
    encode_tokens,
    pack_nodes,
    unpack_nodes,
)
from paceline.wire.verify_messages import MAX_CHAIN, DraftChain


@dataclass(slots=True)
class Aim:
    """A session as the sender of mutated messages sees it."""

    session: int
    epoch: int = 0
    position: int = 0  # output tokens that are decided
    node: int = 0  # the next id of a draft tree's node
    awaits: type[Frame] | None = None  # what alone the receiver of the messages makes use of


class DraftValues:
    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size

    def near(self, value: int) -> int:
        """The number itself in most cases, or one near it, or far from it."""
        if self._rng.random() < 0.75:
            return max(0, value)
        return self._rng.choice((0, max(0, value - 1), value + 1, value + 300, 2**31 - 1, 2**31 - 300))

    def token(self) -> int:
        last = self._vocab_size - 1
        return self._rng.choice((0, 65, 101, last - 1, self._rng.randrange(last), last))

    def tokens(self) -> list[int]:
        tokens = [self.token() for _ in range(self._rng.choice((0, 1, 2, 5, 30)))]
        if self._rng.random() < 0.04:
            return [2**31 - 1, self._vocab_size]
        return tokens * (2000 if self._rng.random() < 0.02 else 1)

    def nodes(self, aim: Aim) -> bytes:
        """A draft tree: a chain, a bush, one whose parents were never sent, or no tree at all."""
        rng = self._rng
        count = rng.choice((1, 1, 2, 5, 15, 16, 256 if rng.random() < 0.1 else 3))
        first = min(self.near(aim.node), 2**31 - 1 - count)
        drawn = tuple(YOURS if rng.random() < 0.1 else self.token() for _ in range(count))
        choices = drawn if rng.random() < 0.5 else None
        parents, tokens = [], []
        for number in range(first, first + count):
            before = rng.choice((number - 1, rng.randrange(max(1, number)), max(0, number - 300)))
            rooted = number == first and rng.random() < 0.5
            parents.append(before if number and not rooted and rng.random() < 0.99 else -1)
            known = rng.choice((FOLLOWS, YOURS)) if choices is not None and before < first else YOURS
            tokens.append(0 if parents[-1] < 0 else known if rng.random() < 0.3 else self.token())
        scores = tuple(rng.choice((0, 1, -(2**30), 2**30)) for _ in range(count)) if choices is None else None
        nodes = EncodedNodes(
            position=self.near(aim.position) if parents[0] < 0 else None,
            level=rng.randrange(3),
            first=first,
            parents=tuple(parents),
            tokens=tuple(tokens),
            choices=choices,
            scores=scores if rng.random() < 0.5 else None,
        )
        aim.node = first + count if first < 2**30 else aim.node
        try:
            packed = pack_nodes(nodes)
        except ValueError:
            packed = rng.randbytes(rng.randrange(40))
        return packed

    @staticmethod
    def num_dists(nodes: bytes) -> int:
        """Number of distributions that belong to these nodes."""
        try:
            unpacked = unpack_nodes(nodes)
        except RemoteProtocolError:
            return 1
        return len(unpacked.parents) if unpacked.choices is None else 0

    def dist(self) -> list[bytes]:
        """A distribution: a right one, one that does not sum, one with other ids, or no numbers at all."""
        rng = self._rng
        count = rng.choice((0, 1, 3, 8))
        ids = bytes(rng.choice((0, 0, 1, 9, 127)) for _ in range(count))
        match rng.randrange(5):
            case 0:
                probs = [rng.choice((math.nan, math.inf, -1.0, 2.0, 1.0, 0.0, 5e-324)) for _ in range(count)]
                return [ids, struct.pack(f"<{count}d", *probs)]
            case 1:
                return [ids, struct.pack(f"<{count}d", *(1.0 / max(1, count) for _ in range(count)))]
            case 2:
                return [b"\xff\xff\xff\xff\x0f" * count, rng.randbytes(2 * count)]
            case 3:
                return [ids, struct.pack(f"<{count}H", *(rng.choice((0, 1, 2**15, 2**16 - 1)) for _ in range(count)))]
            case _:
                return [rng.randbytes(rng.choice((0, 5, 300))), rng.randbytes(rng.choice((0, 7, 300)))]

    def fit_targets(self, message: list[Any]) -> None:
        """As many lanes as targets, or sources of some of them, or neither."""
        tokens, lanes, sources = (Targets.__struct_fields__.index(name) + 1 for name in ("tokens", "lanes", "sources"))
        count = len(message[tokens])
        message[lanes] = bytes(self._rng.choice((0, 1, 2)) for _ in range(count)) if self._rng.random() < 0.5 else b""
        message[sources] = b""
        if count and not message[lanes]:
            marks = [self._rng.randrange(3) for _ in range(count)]
            message[tokens] = [0 if mark else token for mark, token in zip(marks, message[tokens], strict=True)]
            message[sources] = bytes(marks) if any(marks) else b""

    def fit_drafts(self, message: list[Any]) -> None:
        """Chances for as many drafts as a message has, or distributions, none of which has a second guess."""
        drafts = self.tokens()[:MAX_CHAIN]
        places, probs, dists = (DraftChain.__struct_fields__.index(name) + 1 for name in ("places", "probs", "dists"))
        message[places], message[probs], message[dists] = encode_places([(token, None) for token in drafts]), b"", []
        if self._rng.random() < 0.5:
            message[probs] = self._rng.randbytes(PROB_BYTES * len(drafts))
        else:
            message[dists] = [self._draft_dist() for _ in drafts]

    def _draft_dist(self) -> bytes:
        """The distribution of a draft: a right one, or one that is none."""
        rng, count = self._rng, self._rng.choice((1, 2, 5))
        counts = rng.choice(([POINTS - count + 1] + [1] * (count - 1), [1] * count))
        ids = sorted(rng.sample(range(self._vocab_size + rng.randrange(2)), count))
        steps = [after - before - 1 for before, after in zip([-1, *ids], ids, strict=False)]
        return encode_tokens([*steps, *(each - 1 for each in counts)])
