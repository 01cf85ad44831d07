"""A program whose GPU has failed says so and ends, so that a supervisor can start it again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from paceline.commands.demo import clean_environment

# The fake model, whose device fails for good at the word DIE.
PROGRAM = """
import sys
from paceline.commands.main import main
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineLost

forward = FakeEngine.forward

def failing(self, batch):
    if any(b"DIE" in bytes(token % 256 for token in segment.tokens) for segment in batch.segments):
        raise EngineLost("the GPU has failed: an illegal memory access")
    return forward(self, batch)

FakeEngine.forward = failing
sys.argv = ["paceline", "serve", "--model", "fake", "--port", "0", "--state-dir", sys.argv[1]]
main()
"""


def test_a_lost_engine_ends_the_program(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(os.environ),
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "serving" in line)
        url = ready.split(" on ")[1].split(" ")[0]
        with httpx.Client(base_url=url, timeout=300) as client:
            body = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            assert client.get("/readyz").status_code == 200
            body["messages"] = [{"role": "user", "content": "DIE"}]
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 500 and "GPU has failed" in answer.json()["error"]["message"]
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 2
        assert "paceline: the GPU has failed: an illegal memory access" in errors.splitlines()[-1]
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
