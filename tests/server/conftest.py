from __future__ import annotations

import pytest

from paceline.wire import identity


@pytest.fixture
def cheap_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses at codes cost next to nothing, where both ends of an enrolment are in this process."""
    monkeypatch.setattr(identity, "SCRYPT_COST", 16)
