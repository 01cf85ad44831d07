"""What a device has spent beyond its budget: kept over restarts, shared by requests, forgotten where it is damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paceline.core.energy import PowerMeter
from paceline.errors import PacelineError
from paceline.runtime.energy import SideEnergy
from paceline.wire.messages import Options
from paceline.wire.verify_messages import VerifyOptions

METER = PowerMeter("power", lambda: 12.0, lambda: 0.0, measured=False)


def test_a_debt_outlives_the_program(tmp_path: Path) -> None:
    energy = SideEnergy(METER, budget=(1.2, "step"), state_dir=tmp_path)
    queue = energy.queue(VerifyOptions())
    assert queue is not None and queue.weight is None, "by what a draft costs"
    queue.add(5.0)
    energy.save()
    energy.save()
    again = SideEnergy(METER, budget=(1.2, "step"), state_dir=tmp_path).queue(VerifyOptions())
    assert again is not None and again.backlog == pytest.approx(3.8)
    assert (tmp_path / "energy.json").stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "energy.json"], "nothing half-written is left"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"format": 2, "spent_beyond_budget_j": 1}',
        b'{"format": 1, "spent_beyond_budget_j": -1}',
        b'{"format": 1, "spent_beyond_budget_j": NaN}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_a_sentence_and_no_debt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    file = tmp_path / "energy.json"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        kept = SideEnergy(state_dir=tmp_path)
    assert kept.debt.joules == 0.0 and "is damaged" in caplog.text
    kept.debt.joules = 2.0
    kept.save()
    assert SideEnergy(state_dir=tmp_path).debt.joules == 2.0


def test_a_folder_that_takes_nothing_costs_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    kept = SideEnergy(state_dir=tmp_path / "state" / "device")
    kept.debt.joules = 1.0
    with caplog.at_level(logging.WARNING):
        kept.save()
    assert "cannot be kept" in caplog.text


def test_requests_share_one_debt_and_the_stricter_budget_holds() -> None:
    energy = SideEnergy(METER, budget=(0.5, "token"))
    own, stricter, looser, other_unit = (
        energy.queue(VerifyOptions(joules_per_token=asked, joules_per_step=step))
        for asked, step in ((None, None), (0.1, None), (9.0, None), (None, 0.1))
    )
    assert own and stricter and looser and other_unit
    assert [each.budget for each in (own, stricter, looser, other_unit)] == [0.5, 0.1, 0.5, 0.5]
    stricter.add(3.0, tokens=10)
    assert own.backlog == looser.backlog == pytest.approx(2.0)
    asked = SideEnergy(METER).queue(VerifyOptions(joules_per_step=0.7))
    assert asked is not None and (asked.budget, asked.per) == (0.7, "step")


def test_without_a_budget_there_is_no_queue_and_without_a_meter_none_is_kept() -> None:
    assert SideEnergy(METER).queue(VerifyOptions()) is None
    assert SideEnergy(METER).queue(Options()) is None
    with pytest.raises(PacelineError, match="neither measures nor models"):
        SideEnergy().queue(VerifyOptions(joules_per_token=1.0))
