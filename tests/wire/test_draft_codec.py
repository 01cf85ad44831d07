"""What a verifier is sent of a draft's distribution is decoded exactly, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling.dist import Dist
from paceline.core.verification import POINTS, draft_dist
from paceline.errors import RemoteProtocolError
from paceline.wire.payloads import decode_draft_dist, decode_probs, encode_draft_dist, encode_places, encode_prob
from paceline.wire.verify_messages import MAX_DIST_BYTES, DraftChain

VOCAB = 152_000


@given(st.lists(st.integers(1, POINTS), min_size=1, max_size=20))
def test_every_probability_of_the_grid_survives(counts: list[int]) -> None:
    probs = [count / POINTS for count in counts]
    assert decode_probs(b"".join(map(encode_prob, probs))) == probs


@given(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(1e-9, 1.0), min_size=1, max_size=300))
def test_every_distribution_on_the_grid_survives(weights: dict[int, float]) -> None:
    ids = np.array(sorted(weights), dtype=np.int32)
    probs = np.array([weights[int(token)] for token in ids])
    dist = draft_dist(Dist(ids, probs / probs.sum()))
    decoded = decode_draft_dist(encode_draft_dist(dist), VOCAB)
    assert np.array_equal(decoded.ids, dist.ids) and np.array_equal(decoded.probs, dist.probs)


@given(st.binary(max_size=40))
def test_what_is_no_distribution_is_refused(data: bytes) -> None:
    try:
        decoded = decode_draft_dist(data, VOCAB)
    except RemoteProtocolError:
        return
    assert encode_draft_dist(decoded) == data and float(decoded.probs.sum()) == 1.0


def test_faults_are_told() -> None:
    dist = encode_draft_dist(Dist(np.array([300], dtype=np.int32), np.array([1.0])))
    with pytest.raises(RemoteProtocolError, match="outside the vocabulary"):
        decode_draft_dist(dist, 300)
    two = encode_places([(1, None), (2, None)])
    assert "probabilities for 2 tokens" in (DraftChain(0, 0, 0, 0, two, probs=b"a").fault(10) or "")
    assert "1 distributions for 2 tokens" in (DraftChain(0, 0, 0, 0, two, dists=[dist]).fault(10) or "")
    assert "$.recovered" in (DraftChain(0, 0, 1, 0, two, recovered=10).fault(10) or "")
    assert DraftChain(0, 0, 1, 0, two, recovered=9, probs=b"abcd").fault(10) is None


def test_the_longest_law_fits_its_field() -> None:
    flat = draft_dist(Dist.dense(np.full(VOCAB, 1.0 / VOCAB)), max_ids=4096)
    assert len(flat.ids) == 4096 and len(encode_draft_dist(flat)) <= MAX_DIST_BYTES
