"""The two sides of a request, zones, and who may ask a device: absolute names, so that both machines mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

Side = Literal["cloud", "device"]
SIDES: tuple[Side, Side] = ("cloud", "device")


def other(side: Side) -> Side:
    return "device" if side == "cloud" else "cloud"


HandoffLevel = Literal["off", "quality", "balanced", "cheap"]
"""What a device leaves to the larger model of its cloud: everything, or what it is too unsure of."""

WayOfReading = Literal["apart", "together", "reused"]
"""Contexts of several passages: one for each, which are mixed; one for all; or one for all with stored KV that was
computed for each alone, which is approximate."""
WAYS_OF_READING: Final[tuple[WayOfReading, ...]] = get_args(WayOfReading)


# Zones: where documents, models and processing units may be.


Zone = Literal["device", "edge", "cloud"]  # the device, its owner's edge, the cloud


# Which of a cloud's clients may have a device read its private documents: nobody, named keys, or everybody.
#
# A client is known by the name of its key, as the cloud says it. A cloud can say any name, so names tell clients of an
# honest cloud apart and protect from no other.


MAX_NAMES = 64
MAX_NAME = 64  # characters


def is_name(text: str) -> bool:
    """Whether a key or a model's alias may be called so: one line that shows what it is, wherever it is shown."""
    return 0 < len(text) <= MAX_NAME and text.isprintable() and text == text.strip()


@dataclass(frozen=True, slots=True)
class MayAsk:
    """`names` None: everybody; empty: nobody."""

    names: tuple[str, ...] | None = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `off`, `on`, or names of keys separated by commas. Raises ValueError with what is accepted."""
        words = [word.strip() for word in text.split(",")]
        if words in (["on"], ["off"]):
            return cls(None if words == ["on"] else ())
        if len(words) > MAX_NAMES or not all(map(is_name, words)):
            raise ValueError(
                f"must be off, on, or up to {MAX_NAMES} names of the cloud's keys, separated by commas, such as "
                "notebook,phone"
            )
        return cls(tuple(dict.fromkeys(words)))

    @classmethod
    def of(cls, names: list[str] | None) -> Self:
        """The permission as a device tells it to its cloud."""
        return cls(None if names is None else tuple(names))

    def allows(self, asker: str) -> bool:
        """asker: name of the client's key; empty for a client without one."""
        return self.names is None or (bool(asker) and asker in self.names)

    def refusal(self) -> str:
        """Why a client that is not allowed is refused, as the end of a sentence."""
        return "its owner lets only named keys of the cloud ask it" if self.names else "its owner lets no cloud ask it"

    def __str__(self) -> str:
        return "on" if self.names is None else ",".join(self.names) or "off"


NOBODY = MayAsk()
EVERYBODY = MayAsk(None)
