"""R31: can a cloud tell whether a sentence stands in a device's documents, beyond what the answer's text says?

`bench/leakage.py` is the measure, with the demo device model, MiniLM and a cloud that asks and writes nothing; here it
runs at a small size, where an AUC is known to some 0.2. The nightly size judges it. The published run is in
docs/privacy.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bench import leakage
from bench.report import Options
from tests.reliability.conftest import Figure, Size

ASKED = 0.05  # AUC beyond the text
SHORT = ("document-private, mixture",)


def test_a_cloud_learns_little_beyond_the_text(monkeypatch: pytest.MonkeyPatch, size: Size, figure: Figure) -> None:
    count = size(5, 150)
    levels: Mapping[str, tuple[str, str]] = leakage.LEVELS
    if count < 150:
        monkeypatch.setattr(leakage, "LEVELS", {name: levels[name] for name in SHORT})
    monkeypatch.setattr(leakage, "FEW", count)
    heard: list[tuple[str, leakage.Heard]] = []
    ask = leakage.Cloud.ask

    async def kept(self: leakage.Cloud, text: str, privacy: str, aggregator: str) -> leakage.Heard:
        heard.append((privacy, await ask(self, text, privacy, aggregator)))
        return heard[-1][1]

    monkeypatch.setattr(leakage.Cloud, "ask", kept)
    rows = leakage.run(Options(quick=True)).rows
    closed = [one for privacy, one in heard if privacy == "document-private"]
    assert len(closed) >= 6 * count and any(one.tokens for one in closed)
    assert not any(one.weights or one.tops for one in closed), "neither weights nor distributions go up"
    assert max(one.num_passages for one in closed) <= 1, "nor how many passages were found"
    for level in leakage.LEVELS:
        found = [row for row in rows if row["cloud_sees"] == level]
        assert len(found) == 2
        worst = max(float(str(row["beyond_text"])) for row in found)
        judged = ASKED if count >= 150 and level.startswith("document-private") else None
        figure(f"AUC beyond the text, {level}, n = {count}", worst, at_most=judged)
        figure(f"AUC of the text alone, {level}", max(float(str(row["auc_text"])) for row in found))
