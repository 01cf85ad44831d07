"""Messages by which the two ends of a link prove who they are, and by which a device's key is renewed.

What each signature covers is defined in `wire.identity.handshake` and `wire.identity.renewal`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from paceline.core.permission import MAX_NAMES
from paceline.wire.fields import Count, Frame, Hash, Name, Nonce, Part, PublicKey, Signature

MAX_INTRODUCTION_BYTES = 32_768
MAX_KEYS = 2  # that a device holds at once: in use, and not yet confirmed

IntroductionBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_INTRODUCTION_BYTES)]  # an encoded `Introduction`


class Hello(Frame, frozen=True, tag="hello"):
    """First message, from the device: all that it tells a server that has not proved its key."""

    version: Count
    device: Name
    nonce: Nonce


class Challenge(Frame, frozen=True, tag="challenge"):
    """The cloud's reply to Hello: proof of the key that the device pinned when it enrolled, and a nonce to sign."""

    version: Count
    nonce: Nonce
    signature: Signature  # by the cloud's key


class RelevanceScale(Part, frozen=True):
    """The scale of a side's relevance. Scores of two sides can be compared only if theirs are equal."""

    embedder: Hash  # fingerprint of its weights, not its name
    temperature: Annotated[float, msgspec.Meta(gt=0, le=100)]  # by which a cosine is divided


class Introduction(Part, frozen=True):
    """A side's description of itself."""

    tokenizer: Hash  # fingerprint
    model: Hash  # fingerprint
    model_name: Name
    strategies: Annotated[list[Name], msgspec.Meta(max_length=64)]
    documents: Count  # number this side can search; never which
    # Of a device: names of the cloud's keys whose clients may have it read its documents; null: all. It checks them.
    asked_by: Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)] | None = msgspec.field(default_factory=list)
    num_weights: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0  # of the model; 0: unknown
    decode_us: Count = 0  # microseconds of a forward of one row, as measured at the start; 0: unknown
    relevance: RelevanceScale | None = None  # None: it keeps no documents


class Proof(Frame, frozen=True, tag="proof"):
    """The device's reply to Challenge: its introduction, signed by each key that it holds.

    It holds two while a renewal is unconfirmed; one that the cloud accepts is enough.
    """

    introduction: IntroductionBytes
    signatures: Annotated[list[Signature], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]


class Welcome(Frame, frozen=True, tag="welcome"):
    """The cloud's reply to Proof: the device is admitted. The strategies in `introduction` are those of both sides."""

    introduction: IntroductionBytes
    key: PublicKey  # of the device, as the cloud holds it; the device drops any other
    signature: Signature  # by the cloud's key


class RenewKey(Frame, frozen=True, tag="renew"):
    """The cloud asks the device for a new key. Sessions go on meanwhile."""


class NewKey(Frame, frozen=True, tag="newkey"):
    """The device's reply to RenewKey. It has stored the new key beside the present one."""

    key: PublicKey
    signature: Signature  # by the present key
    possession: Signature  # by the new key


class KeyKept(Frame, frozen=True, tag="kept"):
    """The cloud has stored the new key and accepts no other from now on; the device drops the former."""

    signature: Signature  # by the cloud's key


IDENTITY_MESSAGES: tuple[type[Frame], ...] = (Hello, Challenge, Proof, Welcome, RenewKey, NewKey, KeyKept)
