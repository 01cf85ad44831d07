from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import MAX_TEXT, Constraint, SamplingParams, Thinking, process_logits
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.wire import messages
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import (
    constraint_from_wire,
    constraint_to_wire,
    decode,
    decode_part,
    encode,
    encode_part,
    peek_version,
    sampling_from_wire,
    sampling_to_wire,
)
from paceline.wire.messages import (
    MAX_CONTROL_BYTES,
    MAX_FRAME_BYTES,
    ChatMessage,
    DistPayload,
    Introduction,
    Message,
    OpenSession,
    Ping,
    RelevanceScale,
)
from tests.wire.identities import DEVICE
from tests.wire.samples import (
    HELLO,
    PROOF,
    SAMPLING,
    choice,
    closing,
    draft,
    every_message,
    found,
    opening,
    targets,
    weight,
)

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

replace = msgspec.structs.replace


def refusal(data: bytes, vocab_size: int | None = None) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data, vocab_size=vocab_size)
    return caught.value


@pytest.mark.parametrize("message", every_message(), ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message), vocab_size=10) == message


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (["nonsense", 1], r"\$\.tag"),
        (["ping", "soon"], r"\$\.sent_at"),
        (["t", 1, 0, 0, [-1], b"\x00"], r"\$\.tokens\[0\]"),
        (["drain", 1], "length"),
        (["ping"], "length"),
        (["have", 2**60, 0, 0, 0, False], r"\$\.session"),
        ({"t": "drain"}, "array"),
    ],
)
def test_the_path_of_a_fault_is_named(fields: object, path: str) -> None:
    error = refusal(msgspec.msgpack.encode(fields))
    assert error.close_code == CloseCode.BAD_FRAME
    with pytest.raises(RemoteProtocolError, match=path):
        raise error


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (replace(targets(1), lanes=b"\x00"), "lanes"),
        (replace(targets(1), start=2**31 - 2), "tokens"),
        (replace(targets(1), tokens=[5, 10]), "tokens"),
        (replace(draft(1), dists=draft(1).dists[:1]), "dists"),
        (replace(choice(1), nodes=draft(1).nodes), "dists"),
        (replace(weight(1), log_weight=-math.inf), "log_weight"),
        (replace(found(1), passages=[replace(found(1).passages[0], score=math.nan)]), "passages"),
        (replace(opening(1), targets=[10]), "targets"),
        (replace(opening(1), sampling=replace(SAMPLING, logit_bias=[(10, 1.0)])), "logit_bias"),
        (replace(opening(1), sampling=replace(SAMPLING, logit_bias=[(1, 1.0), (1, 2.0)])), "logit_bias"),
        (replace(opening(1), template="\0"), "template"),
        (replace(opening(1), sampling=replace(SAMPLING, temperature=math.nan)), "sampling"),
        (Ping(sent_at=math.inf), "sent_at"),
        (replace(HELLO, device=""), "device"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_contradicting_fields_are_a_fault(message: Message, path: str) -> None:
    error = refusal(encode(message), vocab_size=10)
    assert error.close_code == CloseCode.BAD_FRAME
    assert f"$.{path}" in str(error) or f".{path}`" in str(error)


def test_a_scale_that_no_setting_has_is_a_fault() -> None:
    """By the least float, a cosine becomes an infinity."""
    for temperature in (5e-324, 0.009, 101.0, math.nan):
        with pytest.raises(RemoteProtocolError, match="relevance"):
            decode_part(encode_part(replace(DEVICE, relevance=RelevanceScale("a" * 64, temperature))), Introduction)


def test_drafts_beyond_the_vocabulary_are_a_fault() -> None:
    assert decode(encode(choice(1)), vocab_size=10) == choice(1)
    assert "outside the vocabulary" in str(refusal(encode(choice(1)), vocab_size=9))  # one of its choices is 9
    assert "outside the vocabulary" in str(refusal(encode(draft(1)), vocab_size=5))  # one of its edges is 5


def test_a_bad_distribution_is_not_a_fault_of_the_message() -> None:
    """Distributions are decoded once, where they are used."""
    bad = replace(draft(1), dists=[DistPayload(b"", b""), DistPayload(b"\x41", b"\x00")])
    assert decode(encode(bad), vocab_size=10) == bad


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_extreme_seeds_are_encoded(seed: int) -> None:
    params = SamplingParams(temperature=0.5, logit_bias={9: 1.0, 2: -1.0}, seed=seed)
    message = replace(opening(1), sampling=sampling_to_wire(params))
    received = decode(encode(message))
    assert isinstance(received, type(message))
    assert sampling_from_wire(received.sampling) == params


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-7])
def test_a_temperature_whose_inverse_is_no_number_is_read_as_greedy(temperature: float) -> None:
    received = decode(encode(replace(opening(1), sampling=replace(SAMPLING, temperature=temperature))))
    assert isinstance(received, OpenSession)
    params = sampling_from_wire(received.sampling)
    assert params.temperature == 0.0
    dist = process_logits(Dist.dense(np.array([0.5, 0.3, 0.2, 0.0])), params, {})
    assert np.isfinite(dist.probs).all()


def test_a_repetition_penalty_that_makes_logits_infinite_is_refused() -> None:
    wrong = replace(opening(1), sampling=replace(SAMPLING, repetition_penalty=5e-324))
    assert "$.sampling" in str(refusal(encode(wrong)))


def test_a_constraint_is_encoded_and_one_of_an_unknown_kind_is_refused() -> None:
    ending = Constraint("text", min_tokens=9, ignore_eos=True, stop_ids=(5, 7))
    thinking = Constraint("json_object", thinking=Thinking("<think>", "</think>", begun=True, budget=9))
    for constraint in (None, Constraint("json_object"), Constraint("tools", "{}"), ending, thinking):
        sent = decode(encode(replace(opening(1), constraint=constraint_to_wire(constraint))))
        assert isinstance(sent, OpenSession)
        assert (sent.constraint and constraint_from_wire(sent.constraint)) == constraint
    for kind, text in (("frob", ""), ("json_schema", "x" * (MAX_TEXT + 1))):
        held = messages.SentConstraint(kind, text, 0, False, [])  # type: ignore[arg-type]  # on purpose
        wrong = replace(opening(1), constraint=held)
        assert "$.constraint" in str(refusal(encode(wrong)))


def test_sampling_a_peer_would_refuse_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="temperature"):
        sampling_to_wire(SamplingParams(temperature=100.5))


# ---- sizes ----------------------------------------------------------------------------------------------------------
def test_a_frame_beyond_the_limit_is_too_large() -> None:
    assert refusal(b"\x00" * (MAX_FRAME_BYTES + 1)).close_code == CloseCode.TOO_LARGE


def test_a_control_message_has_the_smaller_limit() -> None:
    wide = replace(PROOF, introduction=encode_part(replace(DEVICE, strategies=["s" * 256] * 64)))
    assert len(encode(wide)) < MAX_CONTROL_BYTES
    raw = msgspec.msgpack.encode(["ping", 1.0]).replace(b"\xa4ping", b"\xdb\x00\x00\x00\x04ping")
    assert decode(raw) == Ping(sent_at=1.0)
    # The fields' own limits keep a control message small; the limit of the frame applies independently.
    assert refusal(msgspec.msgpack.encode(["close", 1, "x" * MAX_CONTROL_BYTES])).close_code == CloseCode.BAD_FRAME


def test_a_message_above_the_limit_is_not_sent() -> None:
    long = ChatMessage(role="user", content="x" * 200_000)
    with pytest.raises(LocalProtocolError, match="open message has"):
        encode(replace(opening(1), messages=[long] * 6))


def test_text_that_is_not_unicode_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError):
        encode(closing(1, "\ud800"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 1_000_000,
        b"\x81" * 1_000_000,
        b"\x92\xa4ping" + b"\x91" * 60_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x93\xa5close\x01\xa1\xff",
        encode(Ping(sent_at=1.0)) + b"\x00",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_nested_oversized_and_random_bytes_are_a_fault_of_the_peer(data: bytes) -> None:
    assert refusal(data).close_code == CloseCode.BAD_FRAME
    assert peek_version(data) is None


# ---- fuzz -----------------------------------------------------------------------------------------------------------
@untimed
@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_fault_of_the_peer(data: bytes) -> None:
    peek_version(data)
    try:
        message = decode(data, vocab_size=100)
    except RemoteProtocolError as error:
        assert error.close_code in set(CloseCode)
    else:
        assert decode(encode(message)) == message
