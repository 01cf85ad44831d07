"""Places of a drafted chain: each a token id, and with some a second guess for the same place.

Varints, each twice an id; plus 1 where the next one is the second guess. A real vocabulary's ids take three bytes with
that bit or without it. Knows nothing of how ids are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads.varints import decode_tokens, encode_tokens

MAX_PLACE_BYTES = 10  # of one place

Place = tuple[int, int | None]  # the draft, and its second guess


def encode_places(places: Sequence[Place]) -> bytes:
    """Raises nothing: a second guess is another id than its draft."""
    numbers: list[int] = []
    for token, second in places:
        numbers += [2 * token] if second is None else [2 * token + 1, 2 * second]
    return encode_tokens(numbers)


def decode_places(data: bytes) -> list[Place]:
    """Inverse of `encode_places`. Raises RemoteProtocolError for what it does not write."""
    places: list[Place] = []
    numbers = iter(decode_tokens(data))
    for number in numbers:
        token, second = number >> 1, None
        if number & 1:
            following = next(numbers, 1)
            second = following >> 1
            if following & 1 or second == token:
                raise RemoteProtocolError("a draft has no second guess of its own", close_code=CloseCode.BAD_FRAME)
        places.append((token, second))
    return places
