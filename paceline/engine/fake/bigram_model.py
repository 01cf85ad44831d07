"""Letter statistics of a word list: the base distributions of the fake model.

Next-byte probabilities after the last two bytes, on a support that keeps the text valid UTF-8 (RFC 3629): inside a
character only bytes that can continue it. Knows nothing of sequences or rows.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

_WORDS = (
    "the of and to in a is that for it was on are as with at be this have from or one had by but not what all were we "
    "when your can said there use an each which she do how their if will up other about out many then them these so "
    "some her would make like him into time has look two more write go see number no way could people my than first "
    "water been call who its now find long down day did get come made may part over new sound take only little work "
    "know place year live me back give most very after thing our just name good sentence man think say great where "
    "help through much before line right too mean old any same tell boy follow came want show also around form three "
    "small set put end does another well large must big even such because turn here why ask went men read need land "
    "café über für grün naïve señor père déjà öl straße"
)
_SEPARATORS = (
    (" ", 14.0),
    (", ", 1.5),
    (". ", 1.5),
    (" \N{EN DASH} ", 0.2),
    ("… ", 0.2),
)  # separators between words, with their weights

_START = np.array(sorted({*b"abcdefghijklmnopqrstuvwxyz .,-'", 0xC3, 0xE2}), dtype=np.int64)
_SECOND = {
    0xC3: (0x9F, 0xA0, 0xA4, 0xA8, 0xA9, 0xAF, 0xB1, 0xB6, 0xBC),
    0xE2: (0x80,),
}  # continuation bytes of its accented letters, dash and ellipsis
_THIRD = {(0xE2, 0x80): (0x93, 0xA6)}  # the dash and the ellipsis
_NARROW = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}  # RFC 3629, section 4


def _support(recent: tuple[int, ...]) -> NDArray[np.int64]:
    """Bytes that may follow the last three tokens, ascending."""
    third, second, last = (-1, -1, *recent)[-3:] if len(recent) < 3 else recent[-3:]
    if last in _SECOND:
        return np.array(_SECOND[last], dtype=np.int64)
    if (second, last) in _THIRD:
        return np.array(_THIRD[second, last], dtype=np.int64)
    if 0xC2 <= last <= 0xF4:  # the lead byte of a character that only a prompt can hold
        low, high = _NARROW.get(last, (0x80, 0xBF))
        return np.arange(low, high + 1, dtype=np.int64)
    inside = 0x80 <= last <= 0xBF
    if inside and (0xE0 <= second <= 0xF4 or (0x80 <= second <= 0xBF and 0xF0 <= third <= 0xF4)):
        return np.arange(0x80, 0xC0, dtype=np.int64)
    return _START


class BigramModel:
    """Base distributions of one seed, which weights the words. Results are cached and must not be written to."""

    def __init__(self, seed: int) -> None:
        words = _WORDS.split()
        weights = np.random.Generator(np.random.PCG64(seed & (1 << 63) - 1)).gamma(1.0, 1.0, len(words)) + 0.1
        self._after_two: defaultdict[tuple[int, int], NDArray[np.float64]] = defaultdict(lambda: np.zeros(257))
        self._after_one: defaultdict[int, NDArray[np.float64]] = defaultdict(lambda: np.zeros(257))
        for word, weight in zip(words, weights, strict=True):
            for separator, frequency in _SEPARATORS:
                text = f" {word}{separator}".encode()
                for i in range(1, len(text)):
                    self._after_one[text[i - 1]][text[i]] += weight * frequency
                    if i > 1 and text[i - 1] != 0x20:  # after a space only the single-byte statistics count
                        self._after_two[text[i - 2], text[i - 1]][text[i]] += weight * frequency
        self._cache: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.float64]]] = {}

    def base(self, recent: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(support, probabilities) of the next byte after the last tokens, newest last."""
        entry = self._cache.get(recent)
        if entry is None:
            entry = self._cache[recent] = self._computed(recent)
        return entry

    def may_end(self, recent: tuple[int, ...]) -> bool:
        """True between characters: an answer must not end inside one."""
        return self.base(recent)[0] is _START

    def _computed(self, recent: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        support, last = _support(recent), recent[-1]
        pair = self._after_two.get((recent[-2], last)) if len(recent) > 1 else None
        single = self._after_one.get(last)
        if single is None:  # a digit, a capital, the end of text: as at the start of a word
            single = self._after_one[0x20]
        probs = np.full(len(support), 0.02 / len(support))
        for share, counts in ((0.08, single), (0.90, single if pair is None else pair)):
            counted = counts[support]
            probs += share * (counted / counted.sum() if counted.sum() else 1.0 / len(support))
        return support, probs
