from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.sampling.dist import ONE, Dist, quantize
from paceline.core.verification import POINTS, draft_dist
from paceline.errors import RemoteProtocolError
from paceline.wire import payloads
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import decode_head, encode_head
from paceline.wire.messages import DistPayload
from paceline.wire.payloads import decode_draft_dist, decode_probs, encode_draft_dist, encode_prob
from paceline.wire.verify_messages import MAX_DIST_BYTES

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def dists(draw: st.DrawFn, max_id: int = 200_000) -> Dist:
    """Distributions that are sparse or dense, peaked or flat, summing to 1 or less."""
    ids = sorted(draw(st.sets(st.integers(0, max_id), max_size=60)))
    weights = draw(st.lists(st.floats(0, 1), min_size=len(ids), max_size=len(ids)))
    rest = draw(st.sampled_from([0.0, 0.0, 1e-12, 0.3]))
    total = sum(weights) + rest
    probs = np.array(weights, dtype=np.float64) / total if total > 0 else np.zeros(len(ids))
    return Dist(np.array(ids, dtype=np.int32), probs, float(1 - probs.sum()))


def same(left: Dist, right: Dist) -> bool:
    return (
        left.ids.tolist() == right.ids.tolist()
        and left.probs.tobytes() == right.probs.tobytes()
        and left.tail == right.tail
    )


def payload(ids: bytes, *codes: int) -> DistPayload:
    return DistPayload(ids=ids, probs=np.array(codes, dtype="<u2").tobytes())


options = st.fixed_dictionaries({"top_p": st.sampled_from([0.5, 0.9, 1.0]), "max_ids": st.none() | st.integers(1, 20)})


@untimed
@given(dists(), options)
def test_a_decoded_distribution_equals_the_senders_bit_for_bit(dist: Dist, how: dict[str, float]) -> None:
    sent = quantize(dist, **how)  # type: ignore[arg-type]  # hypothesis knows the values' types, mypy does not
    assert same(decode_head(encode_head(sent, precise=False), 200_001), sent)
    assert same(decode_head(encode_head(dist, precise=False), 200_001), quantize(dist))
    precise = encode_head(dist, precise=True)
    assert len(precise.probs) == 8 * len(dist.ids)
    assert same(decode_head(precise, 200_001), Dist(dist.ids, dist.probs, max(0.0, 1.0 - float(dist.probs.sum()))))


@untimed
@given(dists(), options)
def test_quantizing_is_idempotent(dist: Dist, how: dict[str, float]) -> None:
    once = quantize(dist, **how)  # type: ignore[arg-type]  # hypothesis knows the values' types, mypy does not
    assert same(quantize(once, **how), once)  # type: ignore[arg-type]  # likewise


@untimed
@given(dists())
def test_the_kept_probabilities_and_the_tail_are_exactly_one_in_any_order(dist: Dist) -> None:
    kept = quantize(dist)
    assert float(kept.probs.sum()) + kept.tail == 1.0
    assert sum(reversed(kept.probs.tolist())) == 1.0 - kept.tail
    assert 0.0 <= kept.tail <= 1.0


@untimed
@given(dists())
def test_a_probability_loses_less_than_a_thousandth_of_itself(dist: Dist) -> None:
    kept = quantize(dist)
    true = dist.probs[np.isin(dist.ids, kept.ids)]
    assert np.all(kept.probs <= true)
    assert np.all(kept.probs >= true * (1 - 2.0**-10))
    assert np.all(dist.probs[~np.isin(dist.ids, kept.ids)] < 2.0**-30)


def test_a_certain_token_stays_certain() -> None:
    kept = quantize(Dist(np.array([3, 4], dtype=np.int32), np.array([1.0, 0.0])))
    assert (kept.ids.tolist(), kept.probs.tolist(), kept.tail) == ([3], [1.0], 0.0)


def test_a_softmax_that_sums_to_a_little_over_one_is_brought_down() -> None:
    dist = Dist(np.arange(4, dtype=np.int32), np.array([0.25, 0.25, 0.25, 0.25 * (1 + 1e-4)]))
    kept = quantize(dist)
    assert kept.probs.sum() + kept.tail == 1.0
    assert kept.tail >= 0


@pytest.mark.parametrize("probs", [[0.9, 0.9], [-0.1, 0.5], [float("nan"), 0.5], [float("inf"), 0.5]])
def test_encoding_an_invalid_distribution_raises_value_error(probs: list[float]) -> None:
    with pytest.raises(ValueError, match="not a distribution"):
        quantize(Dist(np.arange(2, dtype=np.int32), np.array(probs)))


def test_top_p_keeps_the_fewest_most_likely_and_the_lower_of_equals() -> None:
    dist = Dist(np.arange(5, dtype=np.int32), np.array([0.125, 0.25, 0.125, 0.375, 0.125]))
    assert quantize(dist, top_p=0.625).ids.tolist() == [1, 3]
    assert quantize(dist, top_p=0.626).ids.tolist() == [0, 1, 3]
    assert quantize(dist, max_ids=3).ids.tolist() == [0, 1, 3]
    assert quantize(dist, max_ids=4).ids.tolist() == [0, 1, 2, 3]
    assert quantize(dist, top_p=0.1).ids.tolist() == [3]


def test_an_empty_distribution_is_all_tail() -> None:
    empty = Dist(np.zeros(0, dtype=np.int32), np.zeros(0), 1.0)
    assert quantize(empty, top_p=0.5, max_ids=3).tail == 1.0
    assert decode_head(encode_head(empty, precise=False)).tail == 1.0


def test_128_of_152_thousand_ids_take_about_four_bytes_each() -> None:
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=151_936) * 2.2
    probs = np.exp(scores - scores.max())
    kept = quantize(Dist(np.arange(151_936, dtype=np.int32), probs / probs.sum()), max_ids=128)
    packed = encode_head(kept, precise=False)
    assert len(packed.probs) == 256
    assert 128 < len(packed.ids) <= 256


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (payload(b"\x80", ONE), "end within a number"),
        (payload(b"\x80\x00", ONE), "more bytes than it needs"),
        (payload(b"\x64", ONE), "outside the vocabulary"),
        (payload(b"\x00\x00", ONE), "2 ids and 1 probabilities"),
        (payload(b"\x00\x00", ONE, 1), "mass"),
        (payload(b"\x00", ONE + 1), "above 1"),
        (DistPayload(ids=b"\x00", probs=b"\x00"), "within a number"),
    ],
)
def test_bytes_the_encoder_never_writes_are_refused(bad: DistPayload, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why) as caught:
        decode_head(bad, vocab_size=100)
    assert caught.value.close_code == CloseCode.BAD_FRAME


@pytest.mark.parametrize(
    "probs", [[np.nan], [-0.1], [1.5], [0.9, 0.9], [np.inf, 0.0]], ids=["nan", "negative", "above", "mass", "infinite"]
)
def test_precise_numbers_that_form_no_distribution_are_refused(probs: list[float]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_head(DistPayload(ids=bytes(len(probs)), probs=np.array(probs, dtype="<f8").tobytes()), 200_001)
    with pytest.raises(ValueError, match="not a distribution"):
        encode_head(Dist(np.arange(len(probs), dtype=np.int32), np.array(probs)), precise=True)


@untimed
@given(st.binary(max_size=64), st.binary(max_size=64))
def test_any_bytes_are_a_distribution_or_a_fault_of_the_peer(ids: bytes, probs: bytes) -> None:
    try:
        dist = decode_head(DistPayload(ids=ids, probs=probs), 1000)
    except RemoteProtocolError:
        return
    assert np.all(np.diff(dist.ids) > 0)
    assert len(dist.ids) == 0 or (dist.ids[0] >= 0 and dist.ids[-1] < 1000)
    precise = len(probs) == 8 * len(dist.ids) > 0
    assert np.all(dist.probs >= 0) and (precise or dist.probs.all())
    assert 0 <= dist.tail <= 1
    assert encode_head(dist, precise) == DistPayload(ids=ids, probs=probs)  # one encoding per distribution


@given(st.lists(st.integers(0, 2**35 - 1), max_size=60), st.binary(max_size=120))
def test_few_ids_are_written_and_read_as_many_are(values: list[int], data: bytes) -> None:
    """Few go through a loop, many through numpy."""

    def read(data: bytes) -> list[int] | str:
        try:
            return payloads.from_varints(data).tolist()
        except RemoteProtocolError as error:
            return str(error)

    numbers = np.array(values, dtype=np.uint64)
    few = payloads.to_varints(numbers), read(data)
    written = few[0]
    assert read(written) == values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payloads, "_FEW", 0)
        assert (written, few[1]) == (payloads.to_varints(numbers), read(data))


# ---- what a verifier is sent of a draft's distribution --------------------------------------------------------------
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


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    dist = encode_draft_dist(Dist(np.array([300], dtype=np.int32), np.array([1.0])))
    with pytest.raises(RemoteProtocolError, match="outside the vocabulary"):
        decode_draft_dist(dist, 300)


def test_the_longest_law_fits_its_field() -> None:
    flat = draft_dist(Dist.dense(np.full(VOCAB, 1.0 / VOCAB)), max_ids=4096)
    assert len(flat.ids) == 4096 and len(encode_draft_dist(flat)) <= MAX_DIST_BYTES
