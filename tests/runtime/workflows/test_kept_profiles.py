"""Profiles in the state directory: learnt over restarts, believed under their own conditions alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.offloading import ModelShape
from paceline.engine.base import ModelInfo
from paceline.errors import ConfigError
from paceline.runtime.workflows.kept_profiles import (
    FILE,
    MINILM_BYTES,
    Conditions,
    KeptProfiles,
    ProfileFile,
    StoredProfiles,
    launch_bytes,
)
from paceline.workflow.activity import Overlap
from paceline.workflow.profiling import LearningProfiles, OperationProfile, ShapePoint

pytestmark = pytest.mark.anyio

HERE = Conditions("f00", "minilm", "a processor, 2 cores, 8 GiB", 2, "4 lanes, cpu", "")
KEY = "chat/decode", "engine"


def kept(folder: Path | None, conditions: Conditions = HERE) -> KeptProfiles:
    return KeptProfiles(folder, conditions, lambda *_: 1e9, shared=True)


def measured(at: str, seconds: float) -> bytes:
    profiles = LearningProfiles({KEY: OperationProfile([ShapePoint(16, seconds, 4.0)])})
    return StoredProfiles(HERE, profiles, at, ("by hand",)).encode()


async def test_what_was_learnt_with_its_slowdown_is_known_after_a_restart(tmp_path: Path) -> None:
    first = kept(tmp_path / "state")
    profiles = first.open()
    for n in range(24):
        profiles.learn(*KEY, 16, 0.5)
        profiles.learn(*KEY, 16, 1.0, Overlap(1.0, 4.0 + n / 100))
    await first.save()
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600
    again = kept(tmp_path / "state").open().get(*KEY)
    assert again is not None and again.seconds(16) == 0.5
    assert again.slowdown.at(2.0) == pytest.approx(1.0) and again.slowdown.at(6.1) == pytest.approx(2.0, rel=0.05)
    nothing = kept(None)
    nothing.open().learn(*KEY, 16, 0.5)
    await nothing.save()


@pytest.mark.parametrize(
    "change",
    [{"model": "ba5"}, {"embedder": "hash"}, {"machine": "another"}, {"threads": 4}],
    ids=lambda c: next(iter(c)),
)
async def test_profiles_of_other_conditions_are_not_believed(
    tmp_path: Path, change: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    ProfileFile(tmp_path / FILE).write(measured("2030-01-01T00:00:00Z", 0.5))
    with caplog.at_level(logging.WARNING, "paceline.workflow"):
        here = kept(tmp_path, replace(HERE, **change))
        assert here.open().get(*KEY) is None
    assert f"{next(iter(change))}: what units take is learnt anew" in caplog.text
    assert kept(tmp_path).open().get(*KEY) is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": 7}',
        measured("x", 0.5).replace(b'"threads": 2', b'"threads": "2"'),
        measured("x", 0.5).replace(b'"points"', b'"pints"'),
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "bytes", "format", "threads", "rows", "deep"],
)
async def test_a_damaged_file_costs_a_word_in_the_log_and_is_written_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = ProfileFile(tmp_path / FILE)
    file.write(content)
    with pytest.raises(ConfigError, match="damaged"):
        file.read()
    with caplog.at_level(logging.WARNING, "paceline.workflow"):
        here = kept(tmp_path)
        here.open().learn(*KEY, 16, 0.25)
        await here.save()
    assert "damaged" in caplog.text
    found = kept(tmp_path).open().get(*KEY)
    assert found is not None and found.seconds(16) == 0.25


async def test_what_is_measured_while_a_node_runs_wins_over_what_the_node_has_learnt(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / FILE)
    file.write(measured("2030-01-01T00:00:00Z", 0.5))
    here = kept(tmp_path)
    here.open().learn(*KEY, 16, 9.0)
    here.open().learn("embed/encode", "cpu", 1, 0.1)
    file.write(measured("2030-01-02T00:00:00Z", 0.7))
    await here.save()
    stored = file.read()
    assert stored is not None and stored.measured == "2030-01-02T00:00:00Z" and stored.notes == ("by hand",)
    decode, embed = stored.profiles.get(*KEY), stored.profiles.get("embed/encode", "cpu")
    assert decode is not None and decode.seconds(16) == 0.7 and embed is not None and embed.seconds(1) == 0.1
    file.path.unlink()
    await here.save()
    assert not file.path.exists(), "nothing was learnt since"


async def test_a_state_directory_that_cannot_be_written_costs_a_word_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file")
    here = kept(tmp_path / "state")
    here.open().learn(*KEY, 16, 9.0)
    await here.save()
    assert "annot be" in caplog.text


def test_bytes_of_launches_are_those_of_weights_and_keys_and_values() -> None:
    shape = ModelShape(2, 64, 128, kv_share=0.5)
    info = ModelInfo("m", "f", 10, 10, "bfloat16", "paged", num_weights=1000, shape=shape)
    moved = launch_bytes(info, 128, "minilm")
    row = 2 * 2 * 64 * 0.5 * 2
    assert moved("chat/prefill", "engine", 300) == 3 * 2000 + 300 * row
    assert moved("agent/decode", "engine", 4) == 4 * (2000 + 256 * row)
    assert moved("rerank/score", "cpu", 17) == 2 * MINILM_BYTES
    assert moved("host/search", "cpu", 1) == 0.0
    assert launch_bytes(replace(info, num_weights=0), 128, "hash")("chat/prefill", "engine", 3) == 0.0
