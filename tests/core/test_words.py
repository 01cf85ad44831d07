"""Words as they are compared: every spelling of a word or a number has one in common with the others."""

from __future__ import annotations

import pytest

from paceline.core.words import Words, folded

HALF = 30_000


def found(asked: str, text: str) -> bool:
    """True if all words of the one, or a form of each of its numbers, are among those of the other."""
    held, query = {*Words(text).words(), *Words(text).parts()}, Words(asked)
    numbers = query.numbers()
    if numbers:
        return any(forms[0] in held or (len(forms) > 1 and forms[1] in held) for forms in numbers)
    return all(word in held for word in query.words())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("office", "oﬃce"),
        ("Griffin", "GRIFFIN"),
        ("straße", "STRASSE"),
        ("Zürich", "Zu\u0308rich"),
        ("ABC 12", "ＡＢＣ １２"),
        ("software", "soft\u00adware"),
        ("software", "soft\u200bware"),
        ("kilogram", "\ufeffkilogram"),
    ],
)
def test_spellings_that_unicode_calls_compatible_are_one_word(one: str, other: str) -> None:
    assert Words(one).words() == Words(other).words()
    assert folded(folded(other)) == folded(other)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("maintenance", "the main-\ntenance of pumps"),
        ("maintenance", "the main\u00ad\n  tenance of pumps"),
        ("hydraulic", "a hydrau‐\r\nlic pump"),
        ("cost effective", "a cost-\neffective pump"),
        ("email", "an e-mail"),
        ("e-mail", "an email and e mail"),
        ("load_embedder", "def load_embedder()"),
        ("赵强", "铁匠赵强在青岛打造马蹄铁。"),
        ("東京", "田中さんは東京に住んでいます。"),
        ("서울", "김민수는 서울에 산다"),
        ("เชียงใหม่", "สมชายอาศัยอยู่ที่เชียงใหม่ทุกเช้า"),
        ("हिन्दी", "यह हिन्दी है"),
    ],
)
def test_a_word_is_found_however_it_is_divided(asked: str, text: str) -> None:
    assert found(asked, text)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("PPR-1148", "Part PPR1148 fits."),
        ("ppr 1148", "Part PPR-1148 fits."),
        ("PPR_1148", "Part PPR-\n1148 fits."),
        ("INV/2024/00317", "invoice INV-2024-00317"),
        ("202400317", "invoice 2024-00317"),
        ("1284.50", "1,284.50 euros"),
        ("1.284,50", "1,284.50 euros"),
        ("1 284,50", "€1'284.50"),
        ("1284", "1,284 pieces"),
        ("12,5", "12.5 percent"),
        ("2.14", "version v2.14.3"),
        ("2.14.3", "v2.14.3"),
        ("+442079460958", "Phone +44 20 7946 0958."),
        ("020 7946 0958", "Phone +44 (0)20 7946-0958."),
        ("030/1234567", "Tel. +49 30 1234567"),
        ("DE89370400440532013000", "IBAN DE89 3704 0044 0532 0130 00"),
        ("80070057", "code 0x80070057"),
        ("80070b05", "code 0x80070B05"),
        ("10.0.17.254", "IP 10.0.17.254 is the printer"),
        ("5 mg", "5mg a day"),
        ("8.30", "at 8:30"),
        ("29 October 2025", "2025-10-29 12:00 started"),
        ("October 29th, 2025", "29.10.2025"),
        ("29. Oktober", "on Oct 29"),
        ("10/29/2025", "the 29th of October 2025"),
    ],
)
def test_a_number_is_found_however_it_is_written(asked: str, text: str) -> None:
    assert found(asked, text)


@pytest.mark.parametrize(
    ("asked", "text"),
    [("PPR-1148", "1184 PPR"), ("2.14", "room 214"), ("29 October 2025", "2025-10-28"), ("3 may differ", "3 July")],
)
def test_other_numbers_have_nothing_in_common(asked: str, text: str) -> None:
    first = Words(asked).numbers()[-1][0]
    assert first not in {*Words(text).words(), *Words(text).parts()}


@pytest.mark.parametrize(
    "piece", ["a-", "1 ", "1-", "1.1,", "a-\n", "1", "0a", "12 of ", "赵", "1/", "٣ ", "-\n", "\u00ad "]
)
def test_a_text_of_one_piece_gives_a_few_words_a_character(piece: str) -> None:
    text = (piece * HALF)[:HALF]
    assert len([*Words(text).words(), *Words(text).parts(), *Words(text).numbers()]) <= 4 * HALF
