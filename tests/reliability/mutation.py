"""Messages of the link as an attacker would send them, made from the structs of the protocol.

The messages are those of the protocol and of every registered strategy, so one that is added is sent too. What a
message means (which session it belongs to, where the answer stands) is in an `Aim`: most messages of a sequence hit it,
and those that do not are another's, late, early, repeated or huge. Knows neither sockets nor processes.

    mutator = Mutator(random.Random(1), vocab_size=257)
    for frame in mutator.sequence(Aim(session=2), faulty=True): ...

Not handled: bytes below a WebSocket message.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from paceline.errors import RemoteProtocolError
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode
from paceline.wire.fields import MAX_FRAME_BYTES, Frame
from paceline.wire.identity_messages import IDENTITY_MESSAGES
from paceline.wire.messages import CONTROL_MESSAGES, STRATEGY_MESSAGES
from tests.reliability.mutated_fields import REPLACED, Aim, FieldValues

# A strategy lists only messages that no other one has; two may share.
_LISTED = (*CONTROL_MESSAGES, *STRATEGY_MESSAGES, *(kind for each in STRATEGIES.values() for kind in each.messages))
KINDS: Final[tuple[type[Frame], ...]] = tuple(dict.fromkeys(_LISTED))
_encode = msgspec.msgpack.Encoder().encode


def is_legal(frame: bytes, vocab_size: int) -> bool:
    """True if the frame can be decoded: what it says may be wrong all the same."""
    try:
        decode(frame, vocab_size=vocab_size)
    except RemoteProtocolError:
        return False
    return True


class Mutator:
    """Draws frames. Everything random comes from `rng`."""

    def __init__(self, rng: random.Random, *, vocab_size: int, kinds: Sequence[type[Frame]] = KINDS) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._kinds = kinds
        # Few that end the link at once, so that most of a sequence is heard.
        self._weights = [0.1 if issubclass(kind, IDENTITY_MESSAGES) else 1.0 for kind in kinds]
        self._fields = FieldValues(rng, vocab_size)

    def sequence(self, aim: Aim, *, faulty: bool, length: int = 8) -> list[bytes]:
        """Frames for one session: legal ones, some of them repeated, out of order, or of other sessions; and, if
        faulty, one that cannot be decoded, at the end."""
        rng = self._rng
        frames: list[bytes] = []
        for _ in range(rng.randrange(1, length)):
            frames.append(self.legal(rng.choices(self._kinds, self._weights)[0], aim))
            if rng.random() < 0.5:  # the answer is thought to go on
                aim.position += rng.randrange(4)
        for _ in range(rng.randrange(3)):
            frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames))
        if rng.random() < 0.3:
            rng.shuffle(frames)
        return [*frames, self.fault(rng.choice(self._kinds), aim)] if faulty else frames

    def legal(self, kind: type[Frame], aim: Aim) -> bytes:
        """A frame of this kind that can be decoded."""
        for _ in range(500):  # of DraftsWithDists one in eight is legal: 50 tries were too few in a night of them
            frame = _encode(self._fields.message(kind, aim))
            if len(frame) <= MAX_FRAME_BYTES and is_legal(frame, self._vocab_size):
                return frame
        raise AssertionError(f"no legal {kind.__name__} in 500 tries")

    def fault(self, kind: type[Frame], aim: Aim) -> bytes:
        """A frame like one of this kind that cannot be decoded."""
        for _ in range(200):
            frame = self._broken(self._fields.message(kind, aim))
            if not is_legal(frame, self._vocab_size):
                return frame
        raise AssertionError(f"no faulty {kind.__name__} in 200 tries")

    def _broken(self, message: list[Any]) -> bytes:
        rng = self._rng
        match rng.randrange(6):
            case 0:  # a field of another type or beyond its limits
                message[rng.randrange(len(message))] = rng.choice(REPLACED)
            case 1:  # a field too few or too many
                message = message[:-1] if rng.random() < 0.5 else [*message, rng.choice(REPLACED)]
            case 2:  # deep inside
                self._break_inside(message)
            case 3:
                message[0] = rng.choice(("", "hello ", "open\0", "zz", 0, None, ["open"]))
            case 4:
                data = bytearray(_encode(message))
                for _ in range(rng.randrange(1, 4)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else data)
            case _:  # an array that announces more than there is
                return rng.choice((b"", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 9999, b"\xc1"))
        return _encode(message)

    def _break_inside(self, value: list[Any]) -> None:
        inner = [each for each in value if isinstance(each, list) and each]
        if inner and self._rng.random() < 0.8:
            self._break_inside(self._rng.choice(inner))
        elif value:
            value[self._rng.randrange(len(value))] = self._rng.choice(REPLACED)

    def garbage(self) -> bytes:
        """A frame that cannot be decoded, like one of any kind."""
        return self.fault(self._rng.choice(self._kinds), Aim(session=1))
