from __future__ import annotations

from pathlib import Path

from paceline.wire.close_codes import ADVICE, MAX_REASON_BYTES, CloseCode, clip, sentence
from paceline.wire.document import describe

PAGE = Path(__file__).parents[2] / "openapi" / "link.md"


def test_the_page_about_the_link_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == describe(), "python -m paceline.wire.document > openapi/link.md"


def test_every_close_code_tells_the_user_what_to_do() -> None:
    assert set(ADVICE) == set(CloseCode)
    assert all(4000 <= code < 5000 for code in CloseCode)
    assert sentence(CloseCode.TOKENIZER_MISMATCH, "small and large").startswith("small and large. The two models")
    assert "\n" not in sentence(CloseCode.CLOSING, "forged\nlog line\x1b[0m")
    assert sentence(1006, "") == "The connection broke; a device connects again by itself."
    assert sentence(4999, "") == "The link was closed with code 4999."


def test_a_reason_fits_a_close_frame_and_is_never_cut_within_a_character() -> None:
    assert clip("é" * 100) == "é" * (MAX_REASON_BYTES // 2)
    assert clip("short") == "short"
