"""Messages of the link as an attacker would send them, made from the structs of the protocol.

The messages are those that the codec decodes, those of every registered strategy among them, so one that is added is
sent too. What a message means (which session it belongs to, where the answer stands) is in an `Aim`: most messages of a
sequence hit it, and those that do not are another's, late, early, repeated or huge. A message with a short form is sent
in both. Knows neither sockets nor processes.

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
from paceline.wire import codec, payloads
from paceline.wire.codec import decode
from paceline.wire.messages import IDENTITY_MESSAGES, MAX_FRAME_BYTES, DistPayload, Drafts, Frame, SessionMessage
from tests.reliability.mutated_drafts import Aim
from tests.reliability.mutated_fields import REPLACED, FieldValues

KINDS: Final = tuple(codec._known.structs.values())  # those of the strategies too: `mutated_fields` imports these
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
            drawn = rng.choices(self._kinds, self._weights)[0]
            frames.append(self.legal(drawn if aim.awaits is None or rng.random() < 0.5 else aim.awaits, aim))
            if rng.random() < 0.5:  # the answer is thought to go on
                aim.position += rng.randrange(4)
        for _ in range(rng.randrange(3)):
            frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames))
        if rng.random() < 0.3:
            rng.shuffle(frames)
        return [*frames, self.fault(rng.choice(self._kinds), aim)] if faulty else frames

    def legal(self, kind: type[Frame], aim: Aim) -> bytes:
        """A frame of this kind that can be decoded."""
        rng = self._rng
        for _ in range(500):  # few of some kinds are legal: 50 tries were too few in a night of them
            message = self._fields.message(kind, aim)
            frame = self._short(kind, message) if rng.random() < 0.5 else _encode(message)
            if len(frame) <= MAX_FRAME_BYTES and is_legal(frame, self._vocab_size):
                return frame
        raise AssertionError(f"no legal {kind.__name__} in 500 tries")

    def fault(self, kind: type[Frame], aim: Aim) -> bytes:
        """A frame like one of this kind that cannot be decoded."""
        for _ in range(200):
            frame = self._broken(kind, self._fields.message(kind, aim))
            if not is_legal(frame, self._vocab_size):
                return frame
        raise AssertionError(f"no faulty {kind.__name__} in 200 tries")

    def _short(self, kind: type[Frame], message: list[Any]) -> bytes:
        """A message in its short form, where it has one."""
        if not issubclass(kind, SessionMessage) or kind.compact_code is None:
            return _encode(message)
        fields = message[1:]
        if kind is Drafts:
            fields[-1] = [DistPayload(*each) for each in fields[-1]]
        made = kind(*fields)  # unchecked, as an attacker's are
        parts = made.to_compact()
        short = None if parts is None else payloads.pack(kind.compact_code, made.session, made.epoch, *parts)
        return short or _encode(message)

    def _broken(self, kind: type[Frame], message: list[Any]) -> bytes:
        rng = self._rng
        if rng.random() < 0.25 and issubclass(kind, SessionMessage) and kind.compact_code is not None:
            return self._flipped(self._short(kind, message))
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
                return self._flipped(_encode(message))
            case _:  # an array that announces more than there is
                return rng.choice((b"", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 9999, b"\xc1"))
        return _encode(message)

    def _flipped(self, frame: bytes) -> bytes:
        """A frame in which bits are another way round, at times cut off."""
        rng, data = self._rng, bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else data)

    def _break_inside(self, value: list[Any]) -> None:
        inner = [each for each in value if isinstance(each, list) and each]
        if inner and self._rng.random() < 0.8:
            self._break_inside(self._rng.choice(inner))
        elif value:
            value[self._rng.randrange(len(value))] = self._rng.choice(REPLACED)

    def garbage(self) -> bytes:
        """A frame that cannot be decoded, like one of any kind."""
        return self.fault(self._rng.choice(self._kinds), Aim(session=1))
