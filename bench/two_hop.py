"""`paceline bench two_hop`: questions with evidence on both sides, asked over the API of a real pair after workflows.

Server and agent as processes with the demonstration pair; all documents of all questions are in the two stores, so each
passage has to be found. Generated questions are of the kind that the pair was trained on; with a data folder also
HotpotQA and 2WikiMultihopQA, split over the sides, which the pair hardly reads: there, what counts is the citations.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from paceline.commands.demo import Children, configured, start_pair
from paceline.core.side import SIDES
from paceline.rag.embedder import load_embedder

from .report import Claim, Options, Report
from .two_sided import GENERATED, Question, generated, is_correct, real

NAME: Final = "two_hop"
SUMMARY: Final = "two-sided questions over the API: exact answers and citations of both sides, by workflow"
WORKFLOWS: Final = ("", "fast", "advanced")  # "": one search a side
MODEL: Final = "demo-causal"  # its agents take their fallbacks
FEW, MANY = 4, 16  # questions of each kind


@dataclass(frozen=True, slots=True)
class Answered:
    right: bool
    sides: frozenset[str]  # that are cited
    degraded: str | None
    text: str


def run(options: Options) -> Report:
    count = FEW if options.quick else MANY
    kinds: dict[str, list[Question]] = {GENERATED: list(generated(count))}
    if options.data is not None:
        found = real(options.data / "two_sided_qa", "both_sides", count, load_embedder("minilm"))
        kinds["HotpotQA and 2WikiMultihopQA"] = list(found)
    rows: list[dict[str, object]] = []
    for kind, questions in kinds.items():
        with serving(questions) as url, httpx.Client(timeout=300.0) as client:
            rows += [_row(kind, name, [ask(client, url, each, name) for each in questions]) for name in WORKFLOWS]
    shares = {(row["questions"], row["workflow"]): row for row in rows}
    claims = [
        Claim(f"two_hop.{word}_{name or 'plain'}", float(str(shares[GENERATED, name or "none"][key])), least, "higher")
        for name in WORKFLOWS
        for word, key, least in (("exact", "exact", 0.6), ("cited", "cites_both_sides", 0.9))
    ]
    return Report(NAME, {"questions": count, "temperature": 0, "embedder": "minilm"}, rows, claims)


@contextmanager
def serving(questions: Sequence[Question], flags: Sequence[str] = ()) -> Iterator[str]:
    """URL of the device of a linked pair that has all documents of these questions."""
    with tempfile.TemporaryDirectory() as name, Children(folder := Path(name)) as children:
        files = {side: folder / f"documents of the {side}" for side in SIDES}
        for side, directory in files.items():
            directory.mkdir()
            for number, question in enumerate(questions):
                (directory / f"{number:03}.md").write_text(question.documents[side])
        flags = (*flags, *configured(folder, "tuning.threads = 1"))
        pair = start_pair(children, files, model=MODEL, embedder="minilm", device="bench", flags=flags)
        yield pair.url("device")


def ask(client: httpx.Client, url: str, question: Question, workflow: str) -> Answered:
    extension: Mapping[str, object] = {"report": True} | ({"workflow": workflow} if workflow else {})
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question.text}],
        "temperature": 0,
        "max_tokens": 64,
        "paceline": extension,
    }
    reply = client.post(f"{url}/v1/chat/completions", json=body)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    text, told = answer["choices"][0]["message"]["content"], answer["paceline"]
    return Answered(
        is_correct(question, text), frozenset(each["side"] for each in told["citations"]), told["degraded"], text
    )


def _row(kind: str, workflow: str, answers: Sequence[Answered]) -> dict[str, object]:
    return {
        "questions": kind,
        "workflow": workflow or "none",
        "exact": statistics.fmean(each.right for each in answers),
        "cites_both_sides": statistics.fmean({"device", "cloud"} <= each.sides for each in answers),
        "degraded": sum(each.degraded is not None for each in answers),
    }
