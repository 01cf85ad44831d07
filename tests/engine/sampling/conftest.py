"""The two ways to sample on a machine without a GPU."""

from __future__ import annotations

import pytest

from paceline.engine.sampling import batch_sampler, margins, open_sampler, transfers


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sampled as on a CPU, and as on a device of which every look at a number is a wait."""
    if request.param == "device":
        for module in (batch_sampler, margins, open_sampler, transfers):
            monkeypatch.setattr(module, "is_remote", lambda _: True)
