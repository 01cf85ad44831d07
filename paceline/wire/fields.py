"""Types of the fields of messages, each with its limit, and the bases of the messages themselves."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

MAX_FRAME_BYTES = 1 << 20
MAX_CONTROL_BYTES = 1 << 16
KEY_BYTES = 32  # an Ed25519 public key, RFC 8032; the private one is a seed of the same length
SIGNATURE_BYTES = 64
NONCE_BYTES = 32

Name = Annotated[str, msgspec.Meta(max_length=256)]
Hash = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=1_048_576)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
SessionNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
PublicKey = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base: encoded as an array of the fields in this order, without names; an additional field is an error."""


class Frame(Part, frozen=True, tag_field="t"):
    """Base of a message that fills a frame: its array begins with the tag."""

    max_bytes: ClassVar[int] = MAX_CONTROL_BYTES  # limit of its frame
