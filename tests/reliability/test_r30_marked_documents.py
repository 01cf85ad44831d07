"""R30: private documents are marked; no mark is on the link, in logs, metrics, temporary files or the cloud's state.

Both programs run with the fake model, which writes no text of its prompts: so a mark that is found has not come by way
of an answer. What the cloud does see, the question and the answer's tokens, is said in docs/privacy.md. Not looked at:
dumps of a process's memory, and the device's own state, which holds the documents.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.core.side import Side
from paceline.wire.codec import decode
from paceline.wire.messages import Drafts, OpenSession, SessionFrame
from tests.e2e.pair import Pair, running_pair
from tests.reliability.conftest import Figure, Size

MARK_BYTES = 8
SHINGLE = 8  # bytes, which are tokens of the fake model
QUESTION = "Where is my boat number {}?"
LEVELS = ("open", "document-private", "answer-private", "local-only")
WAYS: dict[str, tuple[str, ...]] = {  # strategies that a level permits
    "open": ("aggregate", "draft_verify"),
    "document-private": ("aggregate", "draft_verify"),
    "answer-private": ("autoregressive", "lookup_tree"),
    "local-only": ("autoregressive", "lookup_tree"),
}


class Marked:
    """A pair whose device holds marked documents, with a tap on the link."""

    def __init__(self, pair: Pair, marks: list[str]) -> None:
        assert pair.turnstile is not None
        self.pair = pair
        self.tap = pair.turnstile
        self._shingles = {mark[at : at + SHINGLE].encode() for mark in marks for at in range(len(mark) - SHINGLE + 1)}

    def found(self, data: bytes) -> set[bytes]:
        """Shingles of marks in these bytes."""
        windows = {data[at : at + SHINGLE] for at in range(len(data) - SHINGLE + 1)}
        return windows & self._shingles

    def files(self, *folders: str) -> list[Path]:
        return [path for name in folders for path in (self.pair.directory / name).rglob("*") if path.is_file()]

    def chat(
        self, side: Side, level: str, strategy: str, number: int, *, model: str = "fake", asked: str = ""
    ) -> httpx.Response:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": asked or QUESTION.format(number)}],
            "max_tokens": 12,
            "seed": number,
            "temperature": number % 2,
            "paceline": {"privacy": level, "strategy": strategy, "report": True, "documents": 3},
        }
        return httpx.post(f"{self.pair.url(side)}/v1/chat/completions", json=body, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Marked]:
    directory = tmp_path_factory.mktemp("marked")
    rng = random.Random(30)
    nightly = bool(request.config.getoption("nightly", default=False))
    marks = [rng.randbytes(MARK_BYTES).hex() for _ in range(1000 if nightly else 60)]
    for name in ("tmp", "device-notes"):
        (directory / name).mkdir()
    for number, mark in enumerate(marks):
        (directory / "device-notes" / f"note-{mark}.md").write_text(f"My boat number {number} is {mark}. {mark}!\n")
    documents: dict[Side, str | Path] = {
        "cloud": "The lighthouse of the harbour is painted in green stripes.\n",
        "device": directory / "device-notes",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory / "tmp"))
        with running_pair(directory, documents=documents, stoppable=True) as pair:
            yield Marked(pair, marks)
            pair.children.stop()  # what is kept of an answer has been written then
            assert not list(directory.rglob("tables/*.safetensors")), "no table outlives what was read"


def test_no_mark_leaves_the_device_at_any_level(marked: Marked, size: Size, figure: Figure) -> None:
    assert marked.found((marked.files("device-notes")[0]).read_bytes()), "the search finds what there is"
    counts: Counter[str] = Counter()
    chats = size(4, 200)
    for level in LEVELS:
        for side in ("device", "cloud"):
            if side == "cloud" and level in ("answer-private", "local-only"):
                continue  # asked at the device only
            before = len(marked.tap.up)
            for number in range(chats):
                answer = marked.chat(side, level, WAYS[level][number % len(WAYS[level])], number)
                assert answer.status_code == 200, answer.text
                report, found = answer.json()["paceline"], marked.found(answer.content)
                assert not found or side == "device", "citations of one's own documents"
                counts["chats"] += 1
                counts[report["strategy"]] += 1
                counts[f"cited at the {side}, {level}"] += bool(found)
                if level == "answer-private":
                    assert (report["strategy"], report["degraded"]) == (WAYS[level][number % 2], None)
                    asked = f"{QUESTION.format(number)} How is the lighthouse of the harbour painted?"
                    report = marked.chat(side, level, WAYS[level][number % 2], number, asked=asked).json()["paceline"]
                    assert "cloud" in {cited["side"] for cited in report["citations"]}, "with what the cloud finds"
            if side == "device":
                answer = marked.chat(side, level, WAYS[level][0], 0, model="fake:long")
                assert answer.status_code == 200 and "workflow long" in answer.text, answer.text
            sent = [decode(frame) for frame in marked.tap.up[before:]]
            session = [message for message in sent if isinstance(message, SessionFrame)]
            if level == "local-only":
                assert not session, "nothing goes up"
            if level == "answer-private":
                assert all(m.strategy == "search" for m in session if isinstance(m, OpenSession))
            if level == "document-private":
                dists = sum(len(message.dists) for message in session if isinstance(message, Drafts))
                assert dists == 0, "no distribution goes up"
    assert all(counts[f"cited at the device, {level}"] for level in LEVELS), "their owner is shown them"
    assert all(counts[strategy] for ways in WAYS.values() for strategy in ways), "every way was gone"
    leaks = [frame for frame in marked.tap.everything if marked.found(frame)]
    assert not leaks, leaks[:3]
    assert len(marked.tap.up) > counts["chats"]
    figure("chats over four levels and both sides", counts["chats"])
    figure("frames tapped, none with a shingle of a mark", len(marked.tap.everything))


def test_no_mark_is_in_logs_metrics_temporary_files_or_the_cloud_s_state(marked: Marked, figure: Figure) -> None:
    for number in range(4):
        assert marked.chat("device", "document-private", "aggregate", number).status_code == 200
        assert marked.chat("cloud", "document-private", "aggregate", number).status_code == 200
        kept = {"model": "fake", "input": QUESTION.format(number), "paceline": {"strategy": "aggregate"}}
        stored = httpx.post(f"{marked.pair.url('cloud')}/v1/responses", json=kept, timeout=60, trust_env=False)
        assert stored.status_code == 200, stored.text
    pages = [
        httpx.get(f"{marked.pair.url(side)}{path}", timeout=60, trust_env=False).content
        for side in ("cloud", "device")
        for path in ("/metrics", "/readyz", "/healthz")
    ]
    places = [member.log for member in marked.pair.children.members] + marked.files("tmp", "cloud")
    leaks = [path for path in places if marked.found(path.read_bytes())]
    assert not leaks, leaks
    assert not any(marked.found(page) for page in pages)
    figure("files and pages searched, none with a mark", len(places) + len(pages))
