"""A long question in the background: its server is killed while jobs read, and it is answered after the next start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.commands.demo import configured
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.workflow.jobs import JOB_TOKENS
from tests.api.responses.test_resume import server
from tests.api.scripted import WAIT
from tests.postgres import rows
from tests.reliability.streams import until

pytestmark = pytest.mark.slow
DOCUMENTS = 12
BODY = {
    "model": "fake:long",
    "input": "Where is the broom of the miller?",
    "temperature": 0,
    "max_output_tokens": 12,
    "background": True,
    "paceline": {"report": True, "steps": True},
}


def readings(state: Path) -> int:
    return int(rows(state / "docs" / "documents.sqlite", "SELECT count(*) FROM readings")[0][0])


def ended(http: httpx.Client, response: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def is_over() -> bool:
        found.update(http.get(f"/v1/responses/{response}").json())
        return found["status"] not in ("queued", "in_progress")

    until(is_over)
    return found


def said(response: dict[str, Any]) -> str:
    (message,) = (item for item in response["output"] if item["type"] == "message")
    return str(message["content"][0]["text"])


def test_after_a_kill_it_is_answered_and_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    with DocumentStore.open(tmp_path / "docs", HashEmbedder(), side="cloud") as store:
        for number in range(DOCUMENTS):
            store.add_text(f"{number}.md", f"The broom of the miller number {number} is in the barn.", zone="cloud")
    flags = ("--embedder", "hash", *configured(tmp_path, "tuning.emulate = 'forward=15ms'"))
    with server(tmp_path, *flags) as (process, http):
        made = http.post("/v1/responses", json=BODY).json()
        until(lambda: readings(tmp_path) >= 4)
        process.kill()
        process.wait(WAIT)
    before = readings(tmp_path)
    assert 4 <= before < DOCUMENTS, "it was killed while jobs read"
    with server(tmp_path, *flags) as (_, http):
        done = ended(http, made["id"])
        again = ended(http, http.post("/v1/responses", json=BODY).json()["id"])
    assert (done["status"], said(done)) == (again["status"], said(again)), "as if nothing had happened"
    assert done["status"] in ("completed", "incomplete") and readings(tmp_path) == DOCUMENTS
    tokens, known = (each["paceline"]["stats"]["agent_tokens"] for each in (done, again))
    assert known < tokens <= known + JOB_TOKENS * (DOCUMENTS - before)
