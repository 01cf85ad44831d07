"""The bench of real models on the demonstration's pair, which is small: texts, acceptance, and what costs the link."""

from __future__ import annotations

from bench.models import RealModels
from bench.real import Load, run
from bench.report import Options
from paceline.models import CLOUD, DEVICE


def test_drafts_change_no_text_and_joint_answers_take_the_link() -> None:
    pair = RealModels(str(DEVICE), str(CLOUD))
    report = run(Options(quick=True, models=pair), Load(prompts=1, questions=1, tokens=8, longest=64))
    rows = {(row["part"], row["way"]): row for row in report.rows}
    claims = {claim.name: claim for claim in report.claims}
    for part, first in (("lookup_tree", "lookup_tree"), ("draft_verify", "ours"), ("aggregate", "trees")):
        assert rows[part, first]["same_text"] == rows[part, first]["n"]
        assert claims[f"real.{part}_same_text"].value == 1.0 and claims[f"real.{part}_same_text"].holds
    assert 0.0 < float(str(rows["draft_verify", "ours"]["acceptance"])) <= 1.0
    assert rows["aggregate", "device alone"]["bytes_per_token"] == 0.0 < rows["aggregate", "trees"]["bytes_per_token"]  # type: ignore[operator]
    assert claims["real.aggregate_vs_token_by_token"].value > 1.0
