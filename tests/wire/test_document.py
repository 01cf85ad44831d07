from __future__ import annotations

from pathlib import Path

from lab.link_document import describe
from paceline.wire.close_codes import ADVICE, MAX_REASON_BYTES, CloseCode, clip, sentence

PAGE = Path(__file__).parents[2] / "openapi" / "link.md"


def test_the_generated_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == describe(), "python -m lab.link_document > openapi/link.md"


def test_every_close_code_has_advice_for_the_user() -> None:
    assert set(ADVICE) == set(CloseCode)
    assert all(4000 <= code < 5000 for code in CloseCode)
    assert sentence(CloseCode.NO_COMMON_STRATEGY, "small and large").startswith("small and large. The two sides")
    assert "\n" not in sentence(CloseCode.CLOSING, "forged\nlog line\x1b[0m")
    assert sentence(1006, "") == "The connection broke; a device connects again by itself."
    assert sentence(4999, "") == "The link was closed with code 4999."


def test_a_reason_is_clipped_to_a_close_frame_at_a_character_boundary() -> None:
    assert clip("é" * 100) == "é" * (MAX_REASON_BYTES // 2)
    assert clip("short") == "short"
