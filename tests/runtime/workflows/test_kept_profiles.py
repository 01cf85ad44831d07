"""Profiles in the state directory: learnt over restarts, believed under their own conditions alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paceline.runtime.workflows.kept_profiles import FILE, KeptProfiles

pytestmark = pytest.mark.anyio

KEY = "chat/decode", "engine"


async def learnt(folder: Path) -> None:
    kept = KeptProfiles(folder, "model f00; 2 threads")
    kept.open().learn(*KEY, 16, 0.5)
    await kept.save()


async def test_what_was_learnt_is_known_after_a_restart(tmp_path: Path) -> None:
    await learnt(tmp_path / "state")
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600
    again = KeptProfiles(tmp_path / "state", "model f00; 2 threads").open().get(*KEY)
    assert again is not None and again.seconds(16) == 0.5


async def test_under_other_conditions_all_is_learnt_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await learnt(tmp_path)
    with caplog.at_level(logging.WARNING, "paceline.workflow"):
        assert KeptProfiles(tmp_path, "model ba5; 2 threads").open().get(*KEY) is None
    assert "another model, machine or setting" in caplog.text


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"format": 9}', b"[" * 100_000])
async def test_a_damaged_file_costs_a_line_in_the_log_and_is_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / FILE
    file.write_bytes(content)
    file.chmod(0o600)
    with caplog.at_level(logging.WARNING, "paceline.workflow"):
        assert KeptProfiles(tmp_path, "model f00; 2 threads").open().get(*KEY) is None
    assert "learnt anew" in caplog.text
    await learnt(tmp_path)
    assert KeptProfiles(tmp_path, "model f00; 2 threads").open().get(*KEY) is not None


async def test_a_disk_that_takes_nothing_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "paceline.workflow"):
        await learnt(tmp_path / "state")
    assert "cannot be kept" in caplog.text


async def test_nothing_new_is_not_written(tmp_path: Path) -> None:
    kept = KeptProfiles(tmp_path, "model f00; 2 threads")
    kept.open()
    await kept.save()
    assert not (tmp_path / FILE).exists()
